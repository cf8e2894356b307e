// Package metadatapb is the wire form of the metadata service, generated from
// metadata.proto. It stays inside packages metadata and metadata/server.
package metadatapb

//go:generate go run -C ../../tools ./protogen metadata/metadatapb/metadata.proto
