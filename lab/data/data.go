// Package data holds the default input of the demo: real gradients of a real training run. README.md beside it says
// which.
package data

import "embed"

// Gradients has the files step{SSS}-rank{R}.npy.
//
//go:embed *.npy
var Gradients embed.FS
