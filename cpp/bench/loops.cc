#include "bench/loops.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <deque>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "gpu/gpu.h"
#include "loop/transfer.h"
#include "node/node.h"
#include "node/peer.h"
#include "node/prepared.h"

namespace tensorwire::bench_loops {
namespace {

// Runs `operation` repeats x batch times and returns the mean of each batch in seconds.
template <typename Operation>
Samples measure(size_t repeats, size_t batch, Operation&& operation) {
  if (batch == 0) batch = 1;
  Samples samples;
  samples.reserve(repeats);
  for (size_t i = 0; i < repeats; ++i) {
    const auto begin = Clock::now();
    for (size_t j = 0; j < batch; ++j) operation();
    const std::chrono::duration<double> elapsed = Clock::now() - begin;
    samples.push_back(elapsed.count() / static_cast<double>(batch));
  }
  return samples;
}

// Keeps the compiler from proving that a copied range is never read and dropping the copy.
inline void keep_stores() { asm volatile("" ::: "memory"); }

void send_all(int descriptor, const char* data, size_t size_bytes) {
  while (size_bytes > 0) {
    const ssize_t sent = ::send(descriptor, data, size_bytes, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      throw Error(Code::kPeerLost, std::string("raw socket: send failed: ") + strerror(errno));
    }
    data += sent;
    size_bytes -= static_cast<size_t>(sent);
  }
}

// False at a clean end of stream before the first byte; throws when it ends in the middle.
bool receive_all(int descriptor, char* data, size_t size_bytes) {
  bool begun = false;
  while (size_bytes > 0) {
    const ssize_t received = ::recv(descriptor, data, size_bytes, 0);
    if (received < 0 && errno == EINTR) continue;
    if (received <= 0) {
      if (!begun && (received == 0 || errno == ECONNRESET)) return false;
      throw Error(Code::kPeerLost, "raw socket: the other side ended in the middle of a message");
    }
    begun = true;
    data += received;
    size_bytes -= static_cast<size_t>(received);
  }
  return true;
}

char* bytes_at(uintptr_t address) { return reinterpret_cast<char*>(address); }

void finish(const TransferPtr& transfer) {
  transfer->wait(Deadline());
  if (!transfer->status().ok()) throw Error(transfer->status());
}

void wait_for(Node& node, const Region& region, uint64_t offset, uint64_t value, double timeout_s) {
  if (!node.wait_word(region, offset, value, Deadline::after(timeout_s))) {
    throw Error(Code::kTimeout, "signal ping-pong: the other side did not answer");
  }
}

}  // namespace

// --- limits: memory -------------------------------------------------------------------------

Samples copy_pieces(uintptr_t target, uintptr_t source, size_t piece_bytes, size_t stride_bytes,
                    size_t pieces, size_t repeats, size_t batch) {
  return measure(repeats, batch, [=] {
    for (size_t i = 0; i < pieces; ++i) {
      std::memcpy(bytes_at(target + i * stride_bytes), bytes_at(source + i * stride_bytes),
                  piece_bytes);
      keep_stores();
    }
  });
}

// --- limits: a raw TCP socket ---------------------------------------------------------------

namespace {

// Where the two messages of a round lie: in the buffer, but the shorter one beside it, so that the
// bytes of the buffer stay what they are.
struct Messages {
  Messages(uintptr_t buffer, size_t send_bytes, size_t receive_bytes)
      : note(std::min(send_bytes, receive_bytes), 1),
        sent(send_bytes < receive_bytes ? note.data() : bytes_at(buffer)),
        received(receive_bytes < send_bytes ? note.data() : bytes_at(buffer)) {}

  std::vector<char> note;
  char* const sent;
  char* const received;
};

}  // namespace

Samples socket_rounds(int descriptor, uintptr_t buffer, size_t send_bytes, size_t receive_bytes,
                      size_t repeats, size_t batch) {
  const Messages messages(buffer, send_bytes, receive_bytes);
  return measure(repeats, batch, [&] {
    send_all(descriptor, messages.sent, send_bytes);
    if (!receive_all(descriptor, messages.received, receive_bytes)) {
      throw Error(Code::kPeerLost, "raw socket: the server closed the stream");
    }
  });
}

uint64_t socket_serve(int descriptor, uintptr_t buffer, size_t receive_bytes, size_t send_bytes) {
  const Messages messages(buffer, send_bytes, receive_bytes);
  uint64_t rounds = 0;
  while (receive_all(descriptor, messages.received, receive_bytes)) {
    send_all(descriptor, messages.sent, send_bytes);
    ++rounds;
  }
  return rounds;
}

// --- limits: an exchange of a training step -------------------------------------------------

namespace {

// The constants of the update; exchange_limit_constants hands them to the tests.
constexpr float kRate = 1e-3F, kMomentum = 0.9F;
constexpr float kBeta1 = 0.9F, kBeta2 = 0.999F, kEpsilon = 1e-8F, kDecay = 1e-2F;
constexpr size_t kTile = 2048;  // elements: all arrays of a tile stay in the first cache

// One pass over a range. Loops are inlined into a twin per instruction set, below.
struct Pass {
  float* parameters;
  float* first;   // null: SGD without state
  float* second;  // null: momentum SGD
  const float* const* gradients;
  size_t workers;
  size_t begin, end;
};

#define TENSORWIRE_INLINE inline __attribute__((always_inline))

TENSORWIRE_INLINE void sum_tile(const Pass& pass, size_t at, size_t count, float* __restrict sum) {
  const float* __restrict one = pass.gradients[0] + at;
  const float* __restrict two = pass.gradients[pass.workers > 1 ? 1 : 0] + at;
  const float share = 1.0F / static_cast<float>(pass.workers);
  if (pass.workers == 1) {
    for (size_t i = 0; i < count; ++i) sum[i] = one[i];
    return;
  }
  for (size_t i = 0; i < count; ++i) sum[i] = one[i] + two[i];
  for (size_t w = 2; w < pass.workers; ++w) {
    const float* __restrict next = pass.gradients[w] + at;
    for (size_t i = 0; i < count; ++i) sum[i] += next[i];
  }
  for (size_t i = 0; i < count; ++i) sum[i] *= share;
}

TENSORWIRE_INLINE void plain_tile(float* __restrict parameters, const float* __restrict gradient,
                                  size_t count) {
  for (size_t i = 0; i < count; ++i) parameters[i] -= kRate * gradient[i];
}

TENSORWIRE_INLINE void sgd_tile(float* __restrict parameters, float* __restrict momentum,
                                const float* __restrict gradient, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    momentum[i] = kMomentum * momentum[i] + gradient[i];
    parameters[i] -= kRate * momentum[i];
  }
}

TENSORWIRE_INLINE void adamw_tile(float* __restrict parameters, float* __restrict first,
                                  float* __restrict second, const float* __restrict gradient,
                                  size_t count) {
  for (size_t i = 0; i < count; ++i) {
    first[i] = kBeta1 * first[i] + (1 - kBeta1) * gradient[i];
    second[i] = kBeta2 * second[i] + (1 - kBeta2) * gradient[i] * gradient[i];
    parameters[i] =
        parameters[i] * (1 - kRate * kDecay) - kRate * first[i] / (std::sqrt(second[i]) + kEpsilon);
  }
}

TENSORWIRE_INLINE void run_tiles(const Pass& pass) {
  alignas(64) float sum[kTile];
  for (size_t at = pass.begin; at < pass.end; at += kTile) {
    const size_t count = std::min(kTile, pass.end - at);
    sum_tile(pass, at, count, sum);
    if (pass.first == nullptr) {
      plain_tile(pass.parameters + at, sum, count);
    } else if (pass.second == nullptr) {
      sgd_tile(pass.parameters + at, pass.first + at, sum, count);
    } else {
      adamw_tile(pass.parameters + at, pass.first + at, pass.second + at, sum, count);
    }
  }
}

void run_pass_plain(const Pass& pass) { run_tiles(pass); }

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void run_pass_avx2(const Pass& pass) { run_tiles(pass); }
#endif

void run_pass(const Pass& pass) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return run_pass_avx2(pass);
#endif
  run_pass_plain(pass);
}

}  // namespace

std::vector<float> exchange_limit_constants() {
  return {kRate, kMomentum, kBeta1, kBeta2, kEpsilon, kDecay};
}

Samples exchange_limit(uintptr_t parameters, const std::vector<uintptr_t>& states,
                       const std::vector<uintptr_t>& gradients, size_t elements, size_t threads,
                       size_t repeats) {
  if (gradients.empty() || threads == 0 || states.size() > 2) {
    throw Error(Code::kInvalid,
                "exchange_limit: gradients, threads and at most 2 states are needed");
  }
  const auto floats_at = [](uintptr_t at) { return reinterpret_cast<float*>(at); };
  std::vector<const float*> sources;
  for (const uintptr_t at : gradients) sources.push_back(floats_at(at));
  const Pass whole{floats_at(parameters),
                   states.empty() ? nullptr : floats_at(states[0]),
                   states.size() > 1 ? floats_at(states[1]) : nullptr,
                   sources.data(),
                   sources.size(),
                   0,
                   elements};
  const size_t share = (elements + threads - 1) / threads;
  return measure(repeats, 1, [&] {
    std::vector<std::thread> others;
    for (size_t t = 1; t < threads; ++t) {
      Pass part = whole;
      part.begin = std::min(elements, t * share);
      part.end = std::min(elements, part.begin + share);
      others.emplace_back([part] { run_pass(part); });
    }
    Pass mine = whole;
    mine.end = std::min(elements, share);
    run_pass(mine);
    for (std::thread& other : others) other.join();
    keep_stores();
  });
}

// --- the core's own API ---------------------------------------------------------------------

Samples gpu_copies(int gpu, uintptr_t target, uintptr_t source, size_t size_bytes, size_t repeats,
                   size_t batch) {
  Gpu& on = Gpu::at(gpu);
  GpuScope scope(on);
  const cuda::Library& driver = on.driver();
  cuda::Stream stream = nullptr;
  driver.check("a stream", driver.cuStreamCreate(&stream, cuda::kStreamNonBlocking));
  return measure(repeats, batch, [&] {
    driver.check("a copy", driver.cuMemcpyAsync(target, source, size_bytes, stream));
    driver.check("a copy", driver.cuStreamSynchronize(stream));
  });
}

uintptr_t mapped_address(const RemoteRegion& remote) {
  return remote.mapping ? reinterpret_cast<uintptr_t>(remote.mapping->data()) : 0;
}

double start_pipelined(Prepared& prepared, size_t count, size_t depth) {
  std::deque<TransferPtr> under_way;
  auto start = Clock::now();
  for (size_t i = 0; i < count; ++i) {
    if (under_way.size() == depth) {
      finish(std::move(under_way.front()));
      under_way.pop_front();
    }
    under_way.push_back(prepared.start(SignalTo{}, 0));
  }
  for (auto& transfer : under_way) finish(std::move(transfer));
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Samples start_complete(Prepared& prepared, const std::vector<int64_t>& indices, size_t repeats,
                       size_t batch) {
  if (indices.empty()) {
    return measure(repeats, batch, [&] { finish(prepared.start(SignalTo{}, 0)); });
  }
  return measure(repeats, batch, [&] { finish(prepared.start(indices, SignalTo{}, 0)); });
}

Samples fetch_add_complete(Peer& peer, const RemoteRegion& remote, uint64_t offset, size_t repeats,
                           size_t batch) {
  return measure(repeats, batch, [&] { finish(peer.fetch_add(remote, offset, 1)); });
}

Samples signal_ping(Node& node, const Region& mine, uint64_t my_offset, Peer& peer,
                    const RemoteRegion& theirs, uint64_t their_offset, uint64_t first,
                    size_t rounds, double pause_s, double timeout_s) {
  Samples samples;
  samples.reserve(rounds);
  for (uint64_t value = first; value < first + rounds; ++value) {
    if (pause_s > 0) std::this_thread::sleep_for(std::chrono::duration<double>(pause_s));
    const auto begin = Clock::now();
    peer.signal(SignalTo{&theirs, their_offset, value}, {});
    wait_for(node, mine, my_offset, value, timeout_s);
    samples.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return samples;
}

void signal_pong(Node& node, const Region& mine, uint64_t my_offset, Peer& peer,
                 const RemoteRegion& theirs, uint64_t their_offset, uint64_t first, size_t rounds,
                 double timeout_s) {
  for (uint64_t value = first; value < first + rounds; ++value) {
    wait_for(node, mine, my_offset, value, timeout_s);
    peer.signal(SignalTo{&theirs, their_offset, value}, {});
  }
}

}  // namespace tensorwire::bench_loops
