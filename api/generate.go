// Package api is the gRPC interface between the controller, the workers, the server agents and the command line.
package api

//go:generate ./generate.sh
