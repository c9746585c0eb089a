package scenario

// Rate is a link's rate in bits per second; in YAML a number with "kbit", "Mbit" or "Gbit" behind it.
type Rate uint64

// Share is a part of something, 0..1; in YAML a percentage such as "0.1%".
type Share float64
