// The server example loads a cache plan at start-up, refuses one of another model, and sizes its block pool by the plan.
// The engine is left out: what it shows is what a serving runtime does with package plan, and nothing else is imported.
//
//	go run ./examples/server -plan out/model/plan.json -model out/model/model.json -memory 2147483648
//	curl 'localhost:8080/capacity?prompt=8192&generate=512'
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"net/http"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/kvprofile/kvprofile/plan"
)

func main() {
	planPath := flag.String("plan", "plan.json", "cache plan")
	modelPath := flag.String("model", "model.json", "what the server knows of its own model; a run folder has one")
	memory := flag.Int64("memory", 1<<30, "bytes of the KV cache")
	dtype := flag.String("dtype", "", "element type of the cache, the plan's by default")
	listen := flag.String("listen", "localhost:8080", "address")
	flag.Parse()
	model, err := readModel(*modelPath)
	if err != nil {
		log.Fatal(err)
	}
	s, err := start(*planPath, plan.Want{Model: model}, plan.Dtype(*dtype), *memory)
	if err != nil {
		log.Fatal(err)
	}
	log.Printf("%s: %d blocks", s.plan.Model.Name, s.blocks)
	server := &http.Server{Addr: *listen, Handler: s, ReadHeaderTimeout: 5 * time.Second}
	log.Fatal(server.ListenAndServe())
}

// readModel reads the model.json of a run folder. A server that has the model at hand fills in plan.Model itself.
func readModel(path string) (plan.Model, error) {
	var card struct {
		Model plan.Model `json:"model"`
	}
	data, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(data, &card)
	}
	if err != nil {
		return plan.Model{}, fmt.Errorf("model: %w", err)
	}
	return card.Model, nil
}

// errBusy says that a request has to wait.
var errBusy = errors.New("no room in the cache")

// server has one pool of blocks for all sequences.
type server struct {
	plan   *plan.Plan
	dtype  plan.Dtype
	blocks int64
	pool   *plan.BlockPool // for NewKVCache: hands out block numbers

	mu       sync.Mutex
	reserved int64 // blocks
}

// start loads the plan and divides the memory into blocks.
func start(path string, want plan.Want, dtype plan.Dtype, memory int64) (*server, error) {
	p, err := plan.Load(path, want)
	if err != nil {
		return nil, err // a plan.ErrModel, ErrVersion, ErrInvalid: do not serve with it
	}
	for name, q := range p.Policies {
		switch q.Kind() {
		case plan.KindFull, plan.KindStreaming, plan.KindTopK: // what this server's kernels can do
		default:
			return nil, fmt.Errorf("policy %s: this server has no %s", name, q.Kind())
		}
	}
	if dtype != "" && dtype.Size() == 0 {
		return nil, fmt.Errorf("unknown element type %q", dtype)
	}
	s := &server{plan: p, dtype: dtype}
	s.blocks = memory / s.blockBytes()
	if s.blocks < 1 {
		return nil, fmt.Errorf("%d bytes hold no block of %d", memory, s.blockBytes())
	}
	s.pool = plan.NewBlockPool(int(s.blocks))
	return s, nil
}

// blockBytes is the size of a block: usage is counted in whole ones.
func (s *server) blockBytes() int64 {
	u := s.plan.Usage(plan.Request{PromptTokens: 1, Dtype: s.dtype})
	return u.Bytes / u.Blocks
}

// need is the number of blocks that a sequence takes at most: when all its tokens are there, or while its prompt is read.
func (s *server) need(prompt, generate int) int64 {
	u := s.plan.Usage(plan.Request{PromptTokens: prompt, GeneratedTokens: generate, Dtype: s.dtype})
	return (max(u.Bytes, u.PeakPrefillBytes) + s.blockBytes() - 1) / s.blockBytes()
}

// admit reserves the blocks of a sequence, so that it can never run out of them half-way. release gives them back. A
// sequence that was admitted gets plan.NewKVCache(plan.CacheOptions{Pool: s.pool}), which says where every token goes.
func (s *server) admit(prompt, generate int) (release func(), err error) {
	n := s.need(prompt, generate)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.reserved+n > s.blocks {
		return nil, fmt.Errorf("%d of %d blocks are reserved, %d more are needed: %w", s.reserved, s.blocks, n, errBusy)
	}
	s.reserved += n
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.reserved -= n
	}), nil
}

// ServeHTTP answers /capacity?prompt=N&generate=M: how many such sequences fit, with the plan and with a full cache.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	const most = 1 << 27
	prompt, err := strconv.Atoi(r.FormValue("prompt"))
	generate, err2 := strconv.Atoi(r.FormValue("generate"))
	if r.URL.Path != "/capacity" || errors.Join(err, err2) != nil || prompt < 1 || prompt > most || generate < 0 || generate > most {
		http.Error(w, "usage: /capacity?prompt=TOKENS&generate=TOKENS", http.StatusBadRequest)
		return
	}
	u := s.plan.Usage(plan.Request{PromptTokens: prompt, GeneratedTokens: generate, Dtype: s.dtype})
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]int64{ // the connection may be gone
		"sequences": s.blocks / s.need(prompt, generate), "sequences_full": s.blocks * s.blockBytes() / u.FullBytes,
		"bytes": u.Bytes, "full_bytes": u.FullBytes, "peak_prefill_bytes": u.PeakPrefillBytes,
	})
}
