// streams.h: the TCP connections of this process that a rail's bytes travel on. libfabric names none of them, so they are found by the
// addresses of their ends. The descriptors are libfabric's, which closes them: call it where its progress is not driven meanwhile.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace asyncfabric::libfabric {

struct Stream {
  int fd = -1;
  std::string near, far;  // both ends as socket addresses
};

// Those with these ends; an empty one fits any. Nothing: the process has no descriptor left to look with.
std::optional<std::vector<Stream>> find_streams(const std::string& near, const std::string& far);

// Its descriptor still has these ends.
bool is_there(const Stream& stream);

// The streams that an endpoint of ours accepted, as far as one can look.
std::vector<int> connections_to(const std::string& name);

// Both ends have the same IP address: no network lies between them.
bool within_host(const Stream& stream);

// The head of the kernel's tcp_info.
struct StreamFacts {
  uint64_t bytes_received = 0;
  uint32_t silent_ms = 0;  // since something came
  bool established = false;
};
bool look_at(int fd, StreamFacts* out);

// The `net` provider of libfabric 1.17 never closes a connection that it accepted and that had not finished its handshake when
// the listening endpoint was closed. Closes the sockets of this process whose local address is the one of the closed endpoint
// `name`: nobody else can have that address while the endpoint listened on it.
void close_orphans_of(const std::string& name);

}  // namespace asyncfabric::libfabric
