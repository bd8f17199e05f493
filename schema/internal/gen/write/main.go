// Command write makes the JSON Schema of the cache plan and writes it where package schema embeds it. go generate runs
// it in the folder of that package.
package main

import (
	"log"
	"os"

	"github.com/kvprofile/kvprofile/schema/internal/gen"
)

func main() {
	log.SetFlags(0)
	b, err := gen.Schema("../plan")
	if err == nil {
		err = os.WriteFile("cache-plan-v1.schema.json", b, 0o644)
	}
	if err != nil {
		log.Fatal("make the schema: ", err)
	}
}
