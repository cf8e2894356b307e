// Package managedledgerpb is the generated code of the records that package
// managedledger keeps in the metadata store.
//
// Generated types stop at that package's edge: nobody else imports this one.
package managedledgerpb

//go:generate go run -C ../../tools ./protogen managedledger/managedledgerpb/managedledger.proto
