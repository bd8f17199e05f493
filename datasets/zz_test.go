package datasets
import ("testing";"math/rand/v2";"fmt";"bytes";"compress/flate";"strings")
func TestZZ(t *testing.T){
 s,err:=Prose().Stream(Calibration, rand.New(rand.NewPCG(1,2))); if err!=nil {t.Fatal(err)}
 var b bytes.Buffer
 for b.Len()<120000 { b.WriteString(string(s.Next())) }
 fmt.Println(b.String()[:5000])
 txt:=b.Bytes()[:100000]
 var z bytes.Buffer; w,_:=flate.NewWriter(&z,9); w.Write(txt); w.Close()
 f:=strings.Fields(strings.ToLower(string(txt)))
 d:=map[string]int{}; for _,x:=range f { d[strings.Trim(x,".,;:!?\"()'-")]++ }
 fmt.Println("flate",float64(z.Len())/1e5,"words",len(f),"distinct",len(d))
 lex,_:=loadLexicon()
 all:=map[string]bool{}
 for _,tp:=range append(lex.topics,lex.general){ for _,l:=range [][]noun{tp.agents,tp.things,tp.places}{for _,n:=range l{all[n.sg]=true}}; for _,l:=range [][]string{tp.stuff,tp.adj}{for _,n:=range l{all[n]=true}}; for _,l:=range [][]verb{tp.vt,tp.vi}{for _,n:=range l{all[n.base]=true}}}
 fmt.Println("lemmas",len(all))
}
