// Package reducer has the ways of aggregating as a [loop.Reducer].
package reducer
