// A Stream: one connected socket (tcp or unix) that carries frames both ways. Sends without
// copying payload, interleaves large transfers chunk by chunk, receives payload in place.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "error.h"
#include "fork.h"
#include "frame.h"
#include "progress.h"

namespace tensorwire {

// Yields the frames of something large, one chunk after the other. The payload must stay valid
// until the source is destroyed; sources are destroyed when everything was handed to the kernel
// or the stream closed.
class FrameSource {
 public:
  virtual ~FrameSource() = default;
  // Fills in the next frame; true if more follow.
  virtual bool next(Header& header, std::span<const std::byte>& payload) = 0;

 private:
  friend class Stream;
  std::atomic<bool> sent_{false};  // the last frame was handed to the kernel
};

class Stream : public Handler, public std::enable_shared_from_this<Stream> {
 public:
  // on_lost is called once, by the driving thread, when the stream fails or ends. owner (of sink
  // and on_lost) is kept until close().
  Stream(std::shared_ptr<Progress> progress, Descriptor socket, bool is_unix, FrameSink& sink,
         std::function<void(Status)> on_lost, std::shared_ptr<void> owner);

  void start();
  bool is_unix() const { return is_unix_; }

  // Queues a small frame. `now`: hand it to the kernel before returning if it has room; otherwise
  // it goes with the next frame or before the driver sleeps (driving thread only). Descriptors are
  // borrowed until sent; keep holds their owner. Any thread.
  void send(const Header& header, std::string_view body = {}, bool now = true,
            std::span<const int> descriptors = {}, std::shared_ptr<void> keep = {});
  // Queues a large transfer. Any thread.
  void send(std::shared_ptr<FrameSource> source);
  // Everything of the source was handed to the kernel: its payload is not looked at any more.
  bool has_sent(const FrameSource& source);

  // Takes a descriptor that came with the current frame; empty if none did. Driving thread only.
  Descriptor take_descriptor();
  // This process had no descriptor left for one that came. Driving thread only.
  bool dropped_descriptors() const { return dropped_descriptors_; }
  // The payload of a write being received must not go to memory inside [begin, end) any more.
  // Driving thread only.
  bool discard_payload_in(const std::byte* begin, const std::byte* end);

  // Small frames that were queued and not yet taken by the kernel.
  size_t queued() const { return queued_.load(std::memory_order_relaxed); }

  // Sends what it can without blocking, then ends. Nothing touches payload afterwards. Driving
  // thread only; idempotent.
  void close();

  void on_ready(uint32_t events) override;
  void on_flush() override;

 private:
  struct Segment {
    Header header;
    std::string body;
    std::span<const std::byte> payload;
    std::shared_ptr<FrameSource> source;
    bool last = false;  // of the source
    std::shared_ptr<void> keep;
    int descriptors[2] = {-1, -1};
    int descriptor_count = 0;
    uint64_t sent = 0;
    uint64_t size() const { return sizeof(Header) + body.size() + payload.size(); }
  };

  void fill();                  // locked
  bool push(uint64_t budget);   // locked; false if the socket failed
  ssize_t send_some();          // locked
  void want_output(bool want);  // locked
  void batch_wakeups();
  bool receive();
  ssize_t receive_some(std::span<std::span<std::byte>> spans);
  void lose(Status status);
  void watch_silence();
  void look(double pause_s, double limit_s, bool suspected);

  std::shared_ptr<Progress> progress_;
  Descriptor socket_;
  const bool is_unix_;
  std::function<void(Status)> on_lost_;
  std::shared_ptr<void> owner_;  // driving thread only
  FrameParser parser_;
  std::deque<Descriptor> received_;  // driving thread only
  int wake_bytes_ = 1;               // driving thread only

  bool dropped_descriptors_ = false;  // driving thread only

  std::mutex mutex_;
  std::deque<Segment> wire_;                          // generated, in order
  std::deque<std::shared_ptr<FrameSource>> sources_;  // still to generate
  bool waiting_for_room_ = false;
  bool failed_ = false, closed_ = false;
  std::string failure_;
  bool flush_asked_ = false;
  std::atomic<size_t> queued_{0};
};

}  // namespace tensorwire
