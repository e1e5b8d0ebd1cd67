// orphans.h: sockets that libfabric accepted, found by the address that they came to: it names none of them. Those that it forgets are closed
// with their rail.
#pragma once

#include <string>
#include <vector>

namespace asyncfabric::libfabric {

// Descriptors of this process. They are libfabric's, which closes them: call it where its progress is not driven meanwhile.
std::vector<int> connections_to(const std::string& name);

// The `net` provider of libfabric 1.17 never closes a connection that it accepted and that had not finished its handshake when
// the listening endpoint was closed. Closes the sockets of this process whose local address is the one of the closed endpoint
// `name`: nobody else can have that address while the endpoint listened on it.
void close_orphans_of(const std::string& name);

}  // namespace asyncfabric::libfabric
