// region.h: memory we registered (regions) and memory of peers that we hold keys of. Both live in pin tables: an op pins what it
// touches, so that releasing waits for exactly the ops in flight.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "asyncfabric/types.h"
#include "base/pages.h"
#include "base/pin_table.h"
#include "provider/gpu_rail.h"
#include "provider/memory.h"

namespace asyncfabric {

struct Peer;

struct RegionEntry {
  Pages pages;                                 // empty for foreign memory
  std::unique_ptr<DeviceMemory> device_pages;  // likewise, on a GPU
  UniqueFd dmabuf;                             // of memory of a GPU, when there are rails that may want it
  char* base = nullptr;
  uint64_t length = 0;
  int32_t device = kHostDevice;
  uint32_t access = 0;
  std::string refused;      // see RegionInfo
  uint64_t generation = 1;  // guarded by Core::keys_mutex
  uint32_t revoking = 0;    // likewise: keys made now would be dead in a moment
  // Guarded by Core::keys_mutex: by rights, one for each rail; of other rights than the region's own when somebody asked for them.
  std::array<std::vector<std::string>, kAccessRemoteWrite + kAccessRemoteRead + 1> rail_keys;
  std::vector<std::unique_ptr<LocalMemory>> memory;  // one per rail, fixed while the region is open
  bool exported = false;                             // keys_mutex: peers may hold a key
  std::atomic<uint32_t>* nic_regions = nullptr;      // where it is counted, see RailState
  uint32_t zombies = 0;  // keys_mutex: ops that ended while a transport may still use the memory
};

// Asking: the owner has not answered yet whether the key is good. Transports differ in what they do with a dead key, from an error to
// silence, so a key is shown to its owner's engine before its first use.
enum class AttachState : uint8_t { kNone, kAsking, kPending, kAttached };

struct RemoteKey {
  uint64_t incarnation = 0;
  RegionId region = 0;
  uint64_t generation = 0;
  uint64_t offset = 0;
  uint64_t length = 0;
  uint32_t access = 0;
  std::vector<std::string> rail_keys;
  std::string address;
  uint64_t opened_ns = 0;
  // Under the engine lock:
  Peer* peer = nullptr;
  AttachState attach = AttachState::kNone;
  bool stale = false;                                // its owner revoked it
  std::vector<std::unique_ptr<RemoteMemory>> lanes;  // one per lane of the peer
};

using RegionTable = PinTable<RegionEntry>;
using KeyTable = PinTable<RemoteKey>;

}  // namespace asyncfabric
