package engine

// Failure is what a backend panics with when its device fails in the middle of an operation: memory runs out, the device is
// lost. The methods of Model and Student that return an error turn it into one; tensors that were in use then are not given back
// before the backend is closed.
type Failure struct{ Err error }

func (f *Failure) Error() string { return f.Err.Error() }
func (f *Failure) Unwrap() error { return f.Err }

// Catch turns a Failure into an error; other panics go on. It is to be deferred.
func Catch(err *error) {
	switch f := recover().(type) {
	case nil:
	case *Failure:
		*err = f.Err
	default:
		panic(f)
	}
}
