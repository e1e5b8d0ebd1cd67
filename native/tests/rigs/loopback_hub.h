// loopback_hub.h: what the loopback rails of a process share, and their handles. `lock` orders everything.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>

#include "provider/provider.h"

namespace asyncfabric::testing {

class LoopbackRail;

struct LoopbackRegion {
  uint8_t* base = nullptr;
  uint64_t length = 0;
  uint32_t access = 0;
  uint64_t generation = 1;
};

// All rails of the process by their number. A number is never used again, so an address of a dead rail finds nothing.
struct LoopbackHub {
  std::mutex lock;
  std::map<uint64_t, LoopbackRail*> rails;
  uint64_t next_rail = 1;
  uint64_t connections = 0;
  std::function<void()> behind_connect;  // called on the control thread, before the engine gets the connection

  static LoopbackHub& shared() {
    static LoopbackHub* hub = new LoopbackHub;  // never destroyed: rails in static objects may outlive main
    return *hub;
  }
};

struct LoopbackLocal final : LocalMemory {
  uint64_t region = 0;
};
struct LoopbackRemote final : RemoteMemory {
  uint64_t region = 0;
  uint64_t generation = 0;
};
struct LoopbackPeer final : RailPeer {
  ~LoopbackPeer() override;
  bool lost() const override;
  bool gone = false;
  uint64_t owner = 0, rail = 0, connection = 0;  // the rail that connected, and the one it leads to
};

}  // namespace asyncfabric::testing
