// Tight measuring loops for `tensorwire bench`, exposed to Python as
// `tensorwire._core.bench_loops`.
//
// They answer what the C++ core costs without Python around it, and what the machine itself allows
// (memcpy, a raw TCP socket). No policy, no printing, no Python; pinning and process set-up are the
// caller's. Every loop returns one figure in seconds per sample; a sample is the mean of `batch`
// operations in a row, so that the clock (about 30 ns a look) does not blur an operation that is as
// short as the clock itself. Loops block: bindings release the GIL around every one of them.
// Errors are thrown as tensorwire::Error and end the loop; what was measured until then is lost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tensorwire {

class Node;
class Peer;
class Prepared;
struct Region;
struct RemoteRegion;

namespace bench_loops {

using Samples = std::vector<double>;

// --- limits: memory -------------------------------------------------------------------------

// memcpy of `pieces` pieces of `piece_bytes` each from `source` to `target` (addresses of mapped,
// touched memory), `stride_bytes` apart on both sides: the limit of a prepared list of equal
// pieces.
Samples copy_pieces(uintptr_t target, uintptr_t source, size_t piece_bytes, size_t stride_bytes,
                    size_t pieces, size_t repeats, size_t batch);

// Returns the address at which this process maps `remote`, the memory of host or GPU that a write
// on shm reaches; 0 where the path maps nothing (tcp). Valid as long as `remote` lives.
uintptr_t mapped_address(const RemoteRegion& remote);

// One cuMemcpyAsync on a stream of its own between two addresses that the GPU reaches, and
// cuStreamSynchronize: the limit of a transfer in which a GPU has a part. Throws kUnavailable.
Samples gpu_copies(int gpu, uintptr_t target, uintptr_t source, size_t size_bytes, size_t repeats,
                   size_t batch);

// --- limits: a raw TCP socket ---------------------------------------------------------------
// `descriptor` is a connected, blocking stream socket with TCP_NODELAY; the caller owns it.
// `buffer` is touched memory of at least `send_bytes` and `receive_bytes`; of two messages that
// differ in length the shorter one is kept out of it.

// Sends `send_bytes`, receives `receive_bytes`; the other side runs socket_serve with the two
// exchanged.
Samples socket_rounds(int descriptor, uintptr_t buffer, size_t send_bytes, size_t receive_bytes,
                      size_t repeats, size_t batch);
// Receives, then sends, until the other side closes or shuts down its sending half; returns how
// many rounds it served.
uint64_t socket_serve(int descriptor, uintptr_t buffer, size_t receive_bytes, size_t send_bytes);

// --- limits: an exchange of a training step ---------------------------------------------------

// Runs the least work of a server in a synchronous step: one pass, tile by tile, that reads the
// gradients of all workers, parameters and state once and writes parameters and state once. One
// sample is one pass. All addresses are float32 arrays of `elements` that do not overlap, mapped
// and touched. No state: plain SGD. One array of it: momentum SGD. Two: an update of AdamW's shape
// (no correction of the first steps' bias). Constants are those of exchange_limit_constants. With
// `threads` > 1 each thread takes an equal range, and starting and joining them is part of the
// sample.
// Throws Error(kInvalid) without gradients, without threads or with more states.
Samples exchange_limit(uintptr_t parameters, const std::vector<uintptr_t>& states,
                       const std::vector<uintptr_t>& gradients, size_t elements, size_t threads,
                       size_t repeats);
// Learning rate, momentum, beta1, beta2, epsilon, weight decay: for tests against another hand.
std::vector<float> exchange_limit_constants();

// --- the core's own API ---------------------------------------------------------------------

// prepared.start, whole when `indices` is empty, else by index vector; waited for. With one piece
// that is a plain write or read.
Samples start_complete(Prepared& prepared, const std::vector<int64_t>& indices, size_t repeats,
                       size_t batch);
// Seconds that `count` such starts of the whole take when up to `depth` are under way at a time.
double start_pipelined(Prepared& prepared, size_t count, size_t depth);
// peer.fetch_add(1) on the word at `offset` of `remote`, waited for.
Samples fetch_add_complete(Peer& peer, const RemoteRegion& remote, uint64_t offset, size_t repeats,
                           size_t batch);

// Signal ping-pong over two words. signal_ping stores first, first + 1, … in the peer's word
// (`theirs` + `their_offset`) and waits each time until its own word (`mine` + `my_offset`) has
// reached the same value; one sample is one round trip. Before each round it sleeps for `pause_s`
// when that is > 0, so that the other side's spin has ended and it sleeps. signal_pong is the
// mirror and runs `rounds` rounds. `timeout_s` bounds every single wait.
Samples signal_ping(Node& node, const Region& mine, uint64_t my_offset, Peer& peer,
                    const RemoteRegion& theirs, uint64_t their_offset, uint64_t first,
                    size_t rounds, double pause_s, double timeout_s);
void signal_pong(Node& node, const Region& mine, uint64_t my_offset, Peer& peer,
                 const RemoteRegion& theirs, uint64_t their_offset, uint64_t first, size_t rounds,
                 double timeout_s);

}  // namespace bench_loops
}  // namespace tensorwire
