#!/usr/bin/env bash
# Checks and measures the CUDA backend on a machine with an NVIDIA GPU, in two steps:
#
#   scripts/gpu.sh build FOLDER   here: the command, the tests and a small model, as files that need nothing but glibc
#   FOLDER/gpu.sh run [GPU]       there: doctor, every test on the GPU, a run on both devices, benchmarks; prints a short report
#
# cuBLAS is looked for in the usual places; KVPROFILE_CUBLAS names another folder.
set -euo pipefail
case "${1:-}" in
build)
	folder="${2:?folder}"
	mkdir -p "$folder"
	folder="$(cd "$folder" && pwd)"
	cd "$(dirname "$0")/.."
	export CGO_ENABLED=0
	go build -o "$folder/kvprofile" ./cmd/kvprofile
	go test -c -o "$folder/cuda.test" ./internal/engine/cuda
	rm -rf "$folder/model"
	cp -r internal/model/testdata/llama "$folder/model"
	cp scripts/gpu.sh "$folder/gpu.sh"
	;;
run)
	cd "$(dirname "$0")"
	gpu="${2:-0}"
	export KVPROFILE_TEST_CUDA="$gpu"
	export KVPROFILE_TEST_CUBLAS="${KVPROFILE_CUBLAS:-}"
	failed=0
	for precision in f32 bf16; do
		./kvprofile doctor --device "cuda:$gpu" --precision "$precision" || failed=1
	done
	./cuda.test -test.timeout 5m || failed=1
	for device in cpu "cuda:$gpu"; do
		./kvprofile run model -o "out-${device%%:*}" --force -q --device "$device" --lengths 600 --count 2 --passkeys 1 --words 2 \
			--train-lengths 700 --steps 4 --learning-rate 0.5 >/dev/null || failed=1
	done
	./kvprofile diff out-cpu/plan.json out-cuda/plan.json || failed=1
	paste out-cpu/gates/full_attention_heads.tsv out-cuda/gates/full_attention_heads.tsv
	./cuda.test -test.run '^$' -test.bench . -test.benchtime 3x -test.timeout 8m | grep -E '^Benchmark|FAIL' || failed=1
	[ "$failed" = 0 ] && echo "all checks passed" || echo "SOMETHING FAILED"
	exit "$failed"
	;;
*)
	sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
	exit 2
	;;
esac
