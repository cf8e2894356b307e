package rpc

//go:generate go run -C ../../tools ./protogen internal/rpc/failure.proto
//go:generate go run -C ../../tools ./protogen internal/rpc/cluster.proto
