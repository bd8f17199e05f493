package report

import (
	"encoding/base64"
	"fmt"
	"math"

	"github.com/kvprofile/kvprofile/distill"
	"github.com/kvprofile/kvprofile/profile"
)

// Attention maps go into the page as numbers of 8 bits, lower triangles only.
const (
	// mapsLimit bounds them in characters of base64.
	mapsLimit = 2_600_000
	// mapsSamples is the largest number of samples.
	mapsSamples = 3
	// mapLow is the share of a row's attention at number 1 on a logarithmic scale; 255 is all of it, and 0 is for less
	// than mapLow.
	mapLow = 1e-5
)

// mapSizes are the sizes of the maps in the page, the largest that fits is taken.
func mapSizes() []int { return []int{64, 48, 32, 24, 16, 12, 8} }

// attention is the data of the maps in the page.
type attention struct {
	Layers  int         `json:"layers"`
	Heads   int         `json:"heads"` // query heads of a layer
	KVHeads int         `json:"kv"`
	Low     float64     `json:"low"` // see mapLow
	Stops   []string    `json:"stops"`
	First   [2]int      `json:"first"` // layer and query head that are shown first
	Samples []mapSample `json:"samples"`
}

// mapSample are all maps of one sample: layer after layer, head after head, row after row up to the diagonal.
type mapSample struct {
	Name   string `json:"name"`
	Tokens int    `json:"tokens"` // prompt rows
	Tile   int    `json:"tile"`   // tokens of a cell
	Size   int    `json:"size"`   // cells of a row
	Data   string `json:"data"`
}

// attentionMaps packs the maps of the first samples that have them; nil without any. Where the size of the page forbids
// it, fewer samples are taken, then coarser maps.
func (in *Inputs) attentionMaps() (*attention, error) {
	m := in.Record.Meta().Model
	a := &attention{Layers: m.Layers, Heads: m.Heads, KVHeads: m.KVHeads, Low: mapLow}
	for _, c := range viridisStops() {
		a.Stops = append(a.Stops, c.String())
	}
	a.First = in.firstHead(m.Heads / m.KVHeads)
	samples, size := mapsFit(m.Layers*m.Heads, min(mapsSamples, in.Record.Meta().Grid.MapSamples))
	for _, s := range in.Record.Samples() {
		if len(a.Samples) == samples {
			break
		}
		maps, err := in.Record.Maps(s.ID)
		if err != nil {
			return nil, err
		}
		if len(maps) == 0 {
			continue
		}
		if len(maps) != m.Layers*m.Heads {
			return nil, fmt.Errorf("%s: sample %d has %d attention maps, the model %d query heads", in.Record.Dir, s.ID, len(maps), m.Layers*m.Heads)
		}
		var data []byte
		out := mapSample{Name: fmt.Sprintf("%s, sample %d, %d tokens", clip(s.Task, 40), s.ID, s.Prompt), Tokens: s.Prompt}
		for i := range maps {
			if x := &maps[i]; x.Layer != i/m.Heads || x.Head != i%m.Heads || x.Size != maps[0].Size || x.Tile != maps[0].Tile {
				return nil, fmt.Errorf("%s: sample %d: the attention map of layer %d, query head %d is out of order", in.Record.Dir, s.ID, x.Layer, x.Head)
			}
			cells, n, tile := coarser(&maps[i], s.Prompt, size)
			out.Size, out.Tile = n, tile
			for r := range n {
				for c := range r + 1 {
					data = append(data, quantise(cells[r*n+c]))
				}
			}
		}
		out.Data = base64.StdEncoding.EncodeToString(data)
		a.Samples = append(a.Samples, out)
	}
	if len(a.Samples) == 0 {
		return nil, nil
	}
	return a, nil
}

// firstHead is the first query head of the KV head that needs the whole cache most: by its gate, then by its attention
// to needles; the first of all where nothing is known.
func (in *Inputs) firstHead(group int) [2]int {
	var best [2]int
	if in.Gates == nil {
		return best
	}
	needle := in.Gates.Score(distill.ScoreNeedleMass)
	worth := func(l, k int) (float64, float64) {
		if needle == nil {
			return in.Gates.Values[l][k], 0
		}
		return in.Gates.Values[l][k], needle[l][k]
	}
	for l, row := range in.Gates.Values {
		for k := range row {
			g, n := worth(l, k)
			bestG, bestN := worth(best[0], best[1])
			if g > bestG || g == bestG && n > bestN {
				best = [2]int{l, k}
			}
		}
	}
	return [2]int{best[0], best[1] * group}
}

// mapsFit is how many samples and which size keep to mapsLimit with so many maps a sample.
func mapsFit(maps, samples int) (int, int) {
	for _, size := range mapSizes() {
		cells := size * (size + 1) / 2
		if fit := mapsLimit * 3 / 4 / (cells * maps); fit >= 1 {
			return min(samples, fit), size
		}
	}
	return 0, 0
}

// coarser pools a map of a prompt of n rows to at most size cells a row. Cells stay what they are: mean over the tile's
// rows of the mass on the tile's keys.
func coarser(x *profile.Map, n, size int) (cells []float32, rows, tile int) {
	factor := (x.Size + size - 1) / size
	if factor <= 1 {
		return x.Cells, x.Size, x.Tile
	}
	rows, tile = (x.Size+factor-1)/factor, x.Tile*factor
	cells = make([]float32, rows*rows)
	weights := make([]float32, rows)
	for r := range x.Size {
		weight := float32(min(x.Tile, n-r*x.Tile)) // the last tile may have fewer rows
		weights[r/factor] += weight
		for c := range x.Size {
			cells[r/factor*rows+c/factor] += weight * x.Cells[r*x.Size+c]
		}
	}
	for i := range cells {
		cells[i] /= weights[i/rows]
	}
	return cells, rows, tile
}

// quantise is a share of attention on the scale of mapLow; steps are 4.7 %.
func quantise(v float32) byte {
	if !(v >= mapLow) {
		return 0
	}
	return byte(math.Round(1 + 254*min(1, 1-math.Log(float64(v))/math.Log(mapLow))))
}
