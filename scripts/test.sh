#!/usr/bin/env bash
# Everything that CI checks. Needs Go and, for the tests on a real model, python3 with pip.
set -euo pipefail
cd "$(dirname "$0")/.."
export KVPROFILE_TEST_MODEL="${KVPROFILE_TEST_MODEL:-$(scripts/smollm2.sh)}"
step() { printf '== %s\n' "$*" >&2; }

step gofmt
unformatted=$(git ls-files '*.go' | xargs gofmt -l)
[ -z "$unformatted" ] || { echo "gofmt would change: $unformatted" >&2; exit 1; }

step "go mod tidy"
go mod tidy -diff

step "go vet, staticcheck"
go vet ./...
go run honnef.co/go/tools/cmd/staticcheck@v0.8.2 ./...

step "builds without cgo"
for target in linux/amd64 linux/arm64 darwin/arm64; do
	CGO_ENABLED=0 GOOS=${target%/*} GOARCH=${target#*/} go build -o /dev/null ./...
done
CGO_ENABLED=0 go build -tags nocuda -o /dev/null ./cmd/kvprofile

step "clang, which a test compiles the kernels with"
if ! command -v clang++-19 >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	{ apt-get update -qq && apt-get install -y -qq --no-install-recommends clang-19; } >/dev/null 2>&1 || echo "cannot be installed here: the test is skipped" >&2
fi

step "kernels through ptxas"
scripts/ptxas.sh >/dev/null

step tests
go test -timeout 40m ./...
