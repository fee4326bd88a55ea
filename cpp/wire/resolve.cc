#include "wire/resolve.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>

#include <arpa/inet.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "base/blocking.h"
#include "base/error.h"
#include "base/fork.h"

namespace tensorwire {
namespace {

// One call of the system's resolver, shared by those who wait and the thread that makes it.
struct Lookup {
  Lookup() : finished(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!finished) throw Error(Code::kBusy, system_message("eventfd", errno));
  }
  Descriptor finished;  // readable when result may be looked at
  Resolved result;
};

// Look-ups that are under way, by name.
struct Lookups {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Lookup>> running;
};

Resolved ask_system(const std::string& host, uint16_t port, int flags = 0) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  Resolved result;
  if (int error = ::getaddrinfo(host.c_str(), nullptr, &hints, &found)) {
    result.failure =
        error == EAI_SYSTEM ? system_message("getaddrinfo", errno) : ::gai_strerror(error);
    return result;
  }
  std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, ::freeaddrinfo);
  for (addrinfo* each = found; each != nullptr; each = each->ai_next) {
    SocketAddress& address = result.addresses.emplace_back();
    std::memcpy(&address.storage, each->ai_addr, each->ai_addrlen);
    address.size = each->ai_addrlen;
    address.set_port(port);
  }
  return result;
}

void run(const std::string& host, const std::shared_ptr<Lookup>& lookup, Lookups& all) {
  lookup->result = ask_system(host, 0);
  {
    std::lock_guard lock(all.mutex);
    all.running.erase(host);
  }
  ::eventfd_write(lookup->finished.get(), 1);
}

std::shared_ptr<Lookup> join_or_start(const std::string& host) {
  auto& all = fork::of_this_process<Lookups>();
  std::lock_guard lock(all.mutex);
  auto& lookup = all.running[host];
  if (lookup) return lookup;
  try {
    lookup = std::make_shared<Lookup>();
    spawn_blocking([host, lookup, &all] { run(host, lookup, all); });
  } catch (const Error& error) {
    all.running.erase(host);
    throw Error(Code::kBusy, "cannot resolve '" + host + "': " + error.what());
  }
  return lookup;
}

}  // namespace

bool SocketAddress::loopback() const {
  std::string shown = text();
  return shown.starts_with("127.") || shown.starts_with("::ffff:127.") || shown == "::1";
}

bool both_ends_here(int socket) {
  SocketAddress here = SocketAddress::of(socket), there = SocketAddress::of(socket, true);
  return there.size != 0 && (there.text() == here.text() || there.loopback());
}

SocketAddress SocketAddress::of(int socket, bool other_end) {
  SocketAddress found;
  found.size = sizeof found.storage;
  auto ask = other_end ? ::getpeername : ::getsockname;
  bool known = ask(socket, reinterpret_cast<sockaddr*>(&found.storage), &found.size) == 0;
  return known && found.storage.ss_family != AF_UNIX ? found : SocketAddress();
}

// The port lies at the same place in both kinds of address.
void SocketAddress::set_port(uint16_t port) {
  reinterpret_cast<sockaddr_in*>(&storage)->sin_port = htons(port);
}

uint16_t SocketAddress::port() const {
  return ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
}

std::string SocketAddress::text() const {
  char numeric[NI_MAXHOST] = "";
  ::getnameinfo(get(), size, numeric, sizeof numeric, nullptr, 0, NI_NUMERICHOST);
  return numeric;
}

bool wait_ready(int fd, short events, Deadline deadline, const Interrupted& interrupted) {
  for (;;) {
    pollfd entry{fd, events, 0};
    int count = ::poll(&entry, 1, deadline.at_most(kLookForSignalsS).left_ms());
    if (count > 0) return true;
    if (interrupted) interrupted();
    if (deadline.passed()) return false;
  }
}

Resolved read_address(const std::string& host, uint16_t port) {
  return ask_system(host, port, AI_NUMERICHOST);
}

Resolved resolve(const std::string& host, uint16_t port, Deadline deadline,
                 const Interrupted& interrupted) {
  Resolved result = read_address(host, port);
  if (result.addresses.empty()) {
    auto lookup = join_or_start(host);
    if (!wait_ready(lookup->finished.get(), POLLIN, deadline, interrupted)) {
      throw Error(Code::kTimeout, "the name '" + host +
                                      "' was not resolved in time; do the name servers of this "
                                      "host answer (/etc/resolv.conf)?");
    }
    result = lookup->result;
    for (auto& address : result.addresses) address.set_port(port);
  }
  return result;
}

}  // namespace tensorwire
