// cemetery.h: shared-memory rails of one process that talk to each other must not be closed one by one: libfabric hands the
// endpoints of a process plain pointers to each other's segments and follows them after the segment was unmapped (seen with
// 1.17). So a closed rail that was linked to another rail of this process is kept until none of them is open.
// Process-wide, locked; rails that only talk to other processes pass through untouched.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "providers/libfabric/fids.h"

namespace asyncfabric::libfabric {

// What is left of a rail, in the order in which it must be closed.
struct Remains {
  virtual ~Remains() = default;
  virtual void close_endpoints() = 0;  // of all remains first, then the remains are destroyed
};

void note_open(const std::string& name);
// Marks both ends when `to` is an open rail of this process; true then.
bool note_link(const std::string& from, const std::string& to);
// Ends `name`: closes its remains now, or keeps them while linked rails are open.
void note_closed(const std::string& name, std::unique_ptr<Remains> remains);

}  // namespace asyncfabric::libfabric
