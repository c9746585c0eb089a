package aggregator

//go:generate ./generate.sh
