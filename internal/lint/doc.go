// Package lint holds the house rules that are tests: which room may import
// which, that every package introduces itself exactly once, and that no file
// names a path of somebody's machine.
//
// The tests read the files themselves. One that asked the go command instead
// would stay green from the test cache, which sees only files a test opens.
//
// # Not here
//
// What golangci-lint can check is in .golangci.yml.
package lint
