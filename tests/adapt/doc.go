// Package adapt tests what a plan that follows what is measured promises, in the simulator and in labs with real clocks: it reacts in
// time, it never moves ranks more often than it may, every sum is exact meanwhile, and what was decided can be decided again.
package adapt
