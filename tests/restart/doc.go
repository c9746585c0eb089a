// Package restart kills the controller in the middle of whole jobs, in one process.
package restart
