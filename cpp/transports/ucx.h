// The used part of UCX's interface (openucx.org, ucp.h of 1.13), declared here so that a machine
// without UCX builds the same library; the system's UCX is loaded at run time. UCX keeps these
// layouts stable: fields are only appended, and a mask says which are set.
// cpp/tests/ucx_test.cc compares them with UCX's own header where there is one.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

namespace tensorwire::ucx {

using Status = int8_t;
inline constexpr Status kOk = 0;
inline constexpr Status kInProgress = 1;
inline constexpr Status kNoMemory = -4;
inline constexpr Status kInvalidParam = -5;
inline constexpr Status kInvalidAddress = -7;
inline constexpr Status kNotImplemented = -8;
inline constexpr Status kNoDevice = -14;
inline constexpr Status kBusy = -15;
inline constexpr Status kUnsupported = -22;
inline constexpr Status kLastError = -100;

// A call that may go on returns null (done), a status below zero, or a request.
inline bool is_error(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) >= static_cast<uintptr_t>(intptr_t{kLastError});
}
inline Status status_of(const void* pointer) {
  return static_cast<Status>(reinterpret_cast<intptr_t>(pointer));
}

struct ContextOpaque;
struct WorkerOpaque;
struct ListenerOpaque;
struct EndpointOpaque;
struct ConnectionOpaque;
struct MemoryOpaque;
struct KeyOpaque;
struct ConfigOpaque;
using Context = ContextOpaque*;
using Worker = WorkerOpaque*;
using Listener = ListenerOpaque*;
using Endpoint = EndpointOpaque*;
using Connection = ConnectionOpaque*;  // one that asks to be accepted
using Memory = MemoryOpaque*;
using Key = KeyOpaque*;
using Config = ConfigOpaque*;

inline constexpr uint64_t kFeatureRma = 1 << 1, kFeatureWakeup = 1 << 4, kFeatureAm = 1 << 6;

struct ContextParams {
  enum : uint64_t { kFeatures = 1 << 0, kSharedByThreads = 1 << 5, kName = 1 << 8 };
  uint64_t mask;
  uint64_t features;
  size_t request_size;
  void (*request_init)(void*);
  void (*request_cleanup)(void*);
  uint64_t tag_sender_mask;
  int shared_by_threads;
  size_t estimated_endpoints;
  size_t estimated_processes;
  const char* name;
};

struct WorkerParams {
  enum : uint64_t { kThreads = 1 << 0 };
  static constexpr int kSerialized = 1;
  uint64_t mask;
  int threads;
  uint64_t cpus[16];
  unsigned events;
  void* user_data;
  int event_fd;
  uint64_t flags;
  const char* name;
  size_t am_alignment;
  uint64_t client_id;
};

struct Address {
  const sockaddr* address;
  socklen_t size;
};

struct ListenerParams {
  enum : uint64_t { kAddress = 1 << 0, kOnConnection = 1 << 2 };
  uint64_t mask;
  Address address;
  struct {
    void (*call)(Endpoint, void*);
    void* argument;
  } on_accept;
  struct {
    void (*call)(Connection, void*);
    void* argument;
  } on_connection;
};

struct ListenerAttributes {
  enum : uint64_t { kAddress = 1 << 0 };
  uint64_t mask;
  sockaddr_storage address;
};

struct EndpointParams {
  enum : uint64_t {
    kErrorMode = 1 << 1,
    kOnError = 1 << 2,
    kAddress = 1 << 4,
    kFlags = 1 << 5,
    kConnection = 1 << 6,
  };
  static constexpr int kPeerErrors = 1;
  static constexpr unsigned kClientServer = 1 << 0;
  uint64_t mask;
  const void* worker_address;
  int error_mode;
  struct {
    void (*call)(void* argument, Endpoint, Status);
    void* argument;
  } on_error;
  void* user_data;
  unsigned flags;
  Address address;
  Connection connection;
  const char* name;
  Address local_address;
};

struct MemoryParams {
  enum : uint64_t { kAddress = 1 << 0, kLength = 1 << 1 };
  uint64_t mask;
  void* address;
  size_t length;
  unsigned flags;
  unsigned protection;
  int memory_type;
};

struct RequestParams {
  enum : uint32_t { kCallback = 1 << 1, kUserData = 1 << 2, kFlags = 1 << 4, kMemory = 1 << 8 };
  static constexpr uint32_t kForce = 1 << 0;  // closing an endpoint
  static constexpr uint32_t kReply = 1 << 0;  // an active message that carries its endpoint
  static constexpr uint32_t kEager = 1 << 1;  // an active message that carries its bytes
  uint32_t mask;
  uint32_t flags;
  void* request;
  void (*on_done)(void* request, Status, void* user_data);
  uint64_t datatype;
  void* user_data;
  void* reply_buffer;
  int memory_type;
  void* receive_info;
  Memory memory;
};

struct MessageInfo {
  enum : uint64_t { kReplyTo = 1 << 0 };
  uint64_t mask;
  Endpoint reply_to;
};
using OnMessage = Status (*)(void* argument, const void* header, size_t header_size, void* data,
                             size_t size, const MessageInfo*);

struct HandlerParams {
  enum : uint64_t { kId = 1 << 0, kCall = 1 << 2, kArgument = 1 << 3 };
  uint64_t mask;
  unsigned id;
  uint32_t flags;
  OnMessage call;
  void* argument;
};

// UCX's functions, by their own names: USE(result, name, arguments...) for each.
#define TENSORWIRE_UCX_FUNCTIONS(USE)                                                         \
  USE(void, ucp_get_version, unsigned*, unsigned*, unsigned*)                                 \
  USE(const char*, ucs_status_string, Status)                                                 \
  USE(Status, ucp_config_read, const char*, const char*, Config*)                             \
  USE(Status, ucp_config_modify, Config, const char*, const char*)                            \
  USE(void, ucp_config_release, Config)                                                       \
  USE(Status, ucp_init_version, unsigned, unsigned, const ContextParams*, Config, Context*)   \
  USE(void, ucp_cleanup, Context)                                                             \
  USE(Status, ucp_worker_create, Context, const WorkerParams*, Worker*)                       \
  USE(void, ucp_worker_destroy, Worker)                                                       \
  USE(unsigned, ucp_worker_progress, Worker)                                                  \
  USE(Status, ucp_worker_get_efd, Worker, int*)                                               \
  USE(Status, ucp_worker_arm, Worker)                                                         \
  USE(Status, ucp_worker_set_am_recv_handler, Worker, const HandlerParams*)                   \
  USE(Status, ucp_listener_create, Worker, const ListenerParams*, Listener*)                  \
  USE(Status, ucp_listener_query, Listener, ListenerAttributes*)                              \
  USE(Status, ucp_listener_reject, Listener, Connection)                                      \
  USE(void, ucp_listener_destroy, Listener)                                                   \
  USE(Status, ucp_ep_create, Worker, const EndpointParams*, Endpoint*)                        \
  USE(void, ucp_ep_print_info, Endpoint, FILE*)                                               \
  USE(void*, ucp_ep_close_nbx, Endpoint, const RequestParams*)                                \
  USE(void*, ucp_ep_flush_nbx, Endpoint, const RequestParams*)                                \
  USE(Status, ucp_mem_map, Context, const MemoryParams*, Memory*)                             \
  USE(Status, ucp_mem_unmap, Context, Memory)                                                 \
  USE(Status, ucp_rkey_pack, Context, Memory, void**, size_t*)                                \
  USE(void, ucp_rkey_buffer_release, void*)                                                   \
  USE(Status, ucp_ep_rkey_unpack, Endpoint, const void*, Key*)                                \
  USE(void, ucp_rkey_destroy, Key)                                                            \
  USE(void*, ucp_put_nbx, Endpoint, const void*, size_t, uint64_t, Key, const RequestParams*) \
  USE(void*, ucp_get_nbx, Endpoint, void*, size_t, uint64_t, Key, const RequestParams*)       \
  USE(void*, ucp_am_send_nbx, Endpoint, unsigned, const void*, size_t, const void*, size_t,   \
      const RequestParams*)                                                                   \
  USE(Status, ucp_request_check_status, void*)                                                \
  USE(void, ucp_request_free, void*)

struct Library {
#define TENSORWIRE_DECLARE(result, name, ...) result (*name)(__VA_ARGS__);
  TENSORWIRE_UCX_FUNCTIONS(TENSORWIRE_DECLARE)
#undef TENSORWIRE_DECLARE

  std::string version;  // "1.13.1"

  std::string text(Status status) const { return ucs_status_string(status); }
};

// Loads UCX once per process: the file named by TENSORWIRE_UCX, else libucp.so.0 from the default
// path. Throws kUnavailable, with the package to install, if there is none or it is too old.
const Library& library();

}  // namespace tensorwire::ucx
