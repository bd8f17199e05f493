package engine

// Tap asks an attention operation for statistics and receives them: which ones is said by the fields of the first
// part, results stand in Heads and KV. The softmax probabilities themselves, p[i,j] of query i on key j, never exist
// as a whole. Rows counted are the prompt rows [0, Prompt); answer rows are counted apart.
//
// All sums are over exact probabilities (not renormalised); nothing is sampled but Keys.
type Tap struct {
	// Prompt is the number of prompt rows, at most S. All statistics but those of answer rows count rows [0, Prompt).
	Prompt int
	// Far lists distances in tokens: for each, Heads[h].Far[x][j] = sum over prompt rows i with i-j >= Far[x] of p[i,j].
	Far []int
	// Windows lists observation windows in rows: Heads[h].Window[x][j] = sum over the last Windows[x] prompt rows of p[i,j].
	Windows []int
	// VarianceWindow, when positive, asks for Heads[h].Variance over the last VarianceWindow prompt rows.
	VarianceWindow int
	// Recent lists widths in tokens: Heads[h].Recent[x] = mean over prompt rows of the mass on keys with i-j < Recent[x].
	Recent []int
	// Answer lists the query rows that write the answers, ascending: Heads[h].Answer[j] = sum over them of p[i,j], and
	// Heads[h].Top[a] is the key with the largest probability for row Answer[a] (the lowest such key on a tie).
	Answer []int
	// KeysEvery samples every n-th prompt row (rows i with i % n == n-1) for Heads[h].Keys; 0 means none.
	KeysEvery int
	// Masses are the shares of a row's mass, in (0,1), that Keys counts the largest keys for.
	Masses []float64
	// Map, when positive, asks for block-pooled maps of at most Map x Map cells over the prompt.
	Map int
	// Exact lists query heads whose whole prompt map is wanted, in float32 (memory Prompt^2).
	Exact []int

	Heads []HeadStats // one per query head, filled by the backend
	KV    []KVStats   // one per KV head, filled by the backend
}

// HeadStats are the statistics of one query head. S is the number of keys (tokens of the sample).
type HeadStats struct {
	Total   []float32   // S: attention received from prompt rows
	Far     [][]float32 // per Tap.Far, S
	Window  [][]float32 // per Tap.Windows, S
	Answer  []float32   // S, nil without answer rows
	Top     []int32     // per Tap.Answer
	Recent  []float64   // per Tap.Recent, mean mass in [0,1]
	Entropy float64     // mean over prompt rows of the row's entropy, nats
	// Variance: sum over keys of the variance (divisor n) over the last VarianceWindow prompt rows of p[i,j]; keys
	// beyond a row's position count as 0 (CAKE, Qin et al. 2025: how much attention moves).
	Variance float64
	Keys     []float64 // per Tap.Masses: mean over sampled rows of the smallest number of keys that hold the mass
	// Map is MapSize x MapSize, row-major: mean over the query rows of a tile of the mass on the tile's keys. Tiles
	// are MapTile tokens, the last may be short.
	Map              []float32
	MapSize, MapTile int
	Exact            []float32 // Prompt x Prompt or nil
}

// KVStats are the statistics of one KV head.
type KVStats struct {
	ValueNorm    float64 // mean over prompt tokens of the value vector's Euclidean norm
	ValueNormMax float64
}

// MapGrid returns the number of tiles and the tile's width in tokens for a prompt and at most size tiles.
func MapGrid(prompt, size int) (tiles, width int) {
	if prompt <= 0 || size <= 0 {
		return 0, 0
	}
	width = (prompt + size - 1) / size
	return (prompt + width - 1) / width, width
}
