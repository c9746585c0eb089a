package xdp

//go:generate ./generate.sh
