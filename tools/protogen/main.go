// Command protogen compiles the project's .proto files to Go without protoc.
//
// It parses with protocompile and runs the pinned plugins of tools/go.mod:
// protoc-gen-go, protoc-gen-go-vtproto, and protoc-gen-go-grpc for files that
// declare a service. Arguments are .proto paths relative to the repository
// root; each result lands beside its source. Run it through go generate.
package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/bufbuild/protocompile"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/pluginpb"
)

// root is the repository root, seen from the tools module that go run -C enters.
const root = ".."

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: protogen FILE.proto ... (paths from the repository root)")
		os.Exit(2)
	}
	for _, file := range os.Args[1:] {
		if err := generate(context.Background(), file); err != nil {
			fmt.Fprintf(os.Stderr, "protogen: %s: %v\n", file, err)
			os.Exit(1)
		}
	}
}

func generate(ctx context.Context, file string) error {
	compiler := protocompile.Compiler{
		Resolver:       protocompile.WithStandardImports(&protocompile.SourceResolver{ImportPaths: []string{root}}),
		SourceInfoMode: protocompile.SourceInfoStandard, // comments travel into the generated code
	}
	files, err := compiler.Compile(ctx, file)
	if err != nil {
		return err
	}
	compiled := files[0]
	request := &pluginpb.CodeGeneratorRequest{FileToGenerate: []string{file}}
	addWithImports(request, compiled, map[string]bool{})

	plugins := map[string]string{
		"protoc-gen-go":         "paths=source_relative",
		"protoc-gen-go-vtproto": "paths=source_relative,features=marshal+unmarshal+size",
	}
	if compiled.Services().Len() > 0 {
		plugins["protoc-gen-go-grpc"] = "paths=source_relative"
	}
	for plugin, parameter := range plugins {
		if err := run(ctx, plugin, parameter, request); err != nil {
			return fmt.Errorf("%s: %w", plugin, err)
		}
	}
	return nil
}

// addWithImports appends file to the request after everything it imports, the
// order that plugins demand.
func addWithImports(request *pluginpb.CodeGeneratorRequest, file protoreflect.FileDescriptor, seen map[string]bool) {
	if seen[file.Path()] {
		return
	}
	seen[file.Path()] = true
	imports := file.Imports()
	for i := range imports.Len() {
		addWithImports(request, imports.Get(i).FileDescriptor, seen)
	}
	request.ProtoFile = append(request.ProtoFile, toProto(file))
}

func toProto(file protoreflect.FileDescriptor) *descriptorpb.FileDescriptorProto {
	if with, ok := file.(interface {
		FileDescriptorProto() *descriptorpb.FileDescriptorProto
	}); ok {
		return with.FileDescriptorProto()
	}
	return protodesc.ToFileDescriptorProto(file)
}

func run(ctx context.Context, plugin, parameter string, request *pluginpb.CodeGeneratorRequest) error {
	request.Parameter = proto.String(parameter)
	in, err := proto.Marshal(request)
	if err != nil {
		return err
	}
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, "go", "tool", plugin)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(in), &out, os.Stderr
	if err := cmd.Run(); err != nil {
		return err
	}
	var response pluginpb.CodeGeneratorResponse
	if err := proto.Unmarshal(out.Bytes(), &response); err != nil {
		return err
	}
	if response.Error != nil {
		return fmt.Errorf("%s", response.GetError())
	}
	for _, f := range response.GetFile() {
		if err := os.WriteFile(filepath.Join(root, f.GetName()), []byte(f.GetContent()), 0o644); err != nil {
			return err
		}
	}
	return nil
}
