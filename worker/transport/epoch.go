package transport

// Epoch returns the epoch of the plan that the newest round runs or ran under. When it changes, every RESULT of the
// rounds before is in: one round is under way at a time.
func (e *Endpoint) Epoch() uint16 { return e.round.header.Epoch }
