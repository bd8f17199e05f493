#!/bin/sh
# Makes internal/report/testdata/run: a run folder of the smallest model of internal/model/testdata, with an evaluation.
# Paths and times, which differ from machine to machine, are replaced. From the root of the repository:
#
#     sh scripts/fixtures_report.sh
set -e
dir=internal/report/testdata/run
model=internal/model/testdata/llama
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
go build -o "$work/kvprofile" ./cmd/kvprofile
"$work/kvprofile" run $model -o "$work/run" -q --threads 1 --lengths 400 --depths 0.5 --map-samples 1 --passkeys 1 --words 2 --train-lengths 700 \
	--steps 4 --learning-rate 0.9 --budget 0.5 >"$work/log"
"$work/kvprofile" eval $model --plan this="$work/run/plan.json" --compare --run "$work/run" --methods streaming-llm,snapkv --budgets 0.5,0.25 \
	--tasks needle-grid,multi-key --lengths 600,800 --samples 5 --texts 1 -q -o "$work/run/eval.json" >"$work/log"
rm -rf $dir
mkdir -p $dir
(cd "$work/run" && cp -R plan.json fastgen.json pyramid.json run.json eval.json gates record "$OLDPWD/$dir")
sed -i.bak -e "s#$work/#out/#g" -e "s#\"$PWD/#\"/src/#g" \
	-e 's#"\(started\|finished\)": "[^"]*"#"\1": "2026-01-02T03:04:05Z"#' -e 's#"seconds": [0-9.e-]*#"seconds": 1.5#' $dir/run.json
rm $dir/run.json.bak
du -sk $dir
