// Package qemu has no code, only a test: it boots another kernel than the running one in a virtual machine and runs the
// tests of package xdp there. Servers run on the kernels of their distributions, and what one kernel's verifier takes
// another's may refuse.
//
// The test needs qemu and an unpacked kernel package, whose directory XAGG_KERNEL names. On Debian 12, for its 6.1:
//
//	apt-get install qemu-system-x86
//	apt-get download "$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image-/ {print $2}')"
//	dpkg -x linux-image-6.1.*.deb /tmp/kernel
//	XAGG_KERNEL=/tmp/kernel XAGG_REQUIRE=qemu go test ./xdp/qemu
//
// Neither root nor hardware virtualization is needed; without the latter the machine runs for about 15 seconds.
package qemu
