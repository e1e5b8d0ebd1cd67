// orphans.h: sockets that libfabric forgets. Control thread, when a socket rail closes.
#pragma once

#include <string>

namespace asyncfabric::libfabric {

// The `net` provider of libfabric 1.17 never closes a connection that it accepted and that had not finished its handshake when
// the listening endpoint was closed. Closes the sockets of this process whose local address is the one of the closed endpoint
// `name`: nobody else can have that address while the endpoint listened on it.
void close_orphans_of(const std::string& name);

}  // namespace asyncfabric::libfabric
