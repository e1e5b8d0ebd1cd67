// work.h: what the engine hands to a rail and gets back: requests to move bytes or send messages, and events. Plain values; who may
// touch them when stands at Rail::post and Rail::poll (provider.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "asyncfabric/types.h"
#include "provider/memory.h"

namespace asyncfabric {

class Gatherer;  // gatherer.h: only rails whose capabilities have `gathers` look into it

struct Page {           // in the direction of the copy
  uint64_t source = 0;  // byte offset of a write in the region, of a read in the key's range
  uint64_t target = 0;  // byte offset of a write in the key's range, of a read in the region
};

enum class WorkKind : uint8_t { kWrite, kRead, kSend };

struct WorkRequest {
  WorkKind kind = WorkKind::kWrite;
  bool signalled = true;   // false only on ordered rails: no event unless it fails
  bool delivered = false;  // the completion must mean "visible at the target", not only "buffer reusable"
  bool has_imm = false;
  bool urgent = false;  // kSend: a sign of life, which may overtake what waits inside the rail
  uint32_t imm = 0;
  RailPeer* peer = nullptr;
  LocalMemory* local = nullptr;    // null for kSend and for length 0
  RemoteMemory* remote = nullptr;  // null for kSend and for a signal (length 0, has_imm)
  // A write that takes its bytes from here, behind the first `gathered` ones; `address` then only shows that there are some.
  Gatherer* gather = nullptr;
  uint64_t gathered = 0;
  const void* address = nullptr;  // local bytes; kSend: payload, copied or sent before post returns
  uint64_t remote_offset = 0;     // from the start of the registered memory behind `remote`
  uint64_t length = 0;
  // A list: length bytes in `page_count` pages of one size, whose offsets count from `address` and `remote_offset`. Read before post
  // returns, or from shared words until the request is reported.
  const Page* pages = nullptr;
  uint32_t page_count = 0;
  uint64_t last_page = 0;  // no offset of the list behind the key is larger
  uint64_t page_bits = 0;  // every offset of the list, or'ed
  uint64_t tag = 0;        // comes back in RailEvent
};

struct PostResult {
  size_t accepted = 0;  // requests [0, accepted) are owned by the rail and will be reported
  Status status;        // why request [accepted] was not taken; kBusy: try again after a poll
};

// kPathDown: requests to this one peer do not get through now, and the rail works on it; the peer may live. Until kPathUp what
// is posted to it may be refused as busy, and is better posted over another rail.
enum class RailEventKind : uint8_t { kDone, kImmediate, kMessage, kPeerLost, kRailDown, kRailUp, kPathDown, kPathUp };

struct RailEvent {
  RailEventKind kind = RailEventKind::kDone;
  Status status;
  uint64_t tag = 0;          // kDone
  uint32_t imm = 0;          // kImmediate: the bytes that came before it are visible to this thread
  RailPeer* peer = nullptr;  // kPeerLost, kPathDown, kPathUp
  uint64_t connection = 0;   // kMessage: the connection of a peer's rail that brought it; 0: the rail does not know
  const uint8_t* data = nullptr;  // kMessage: valid until the next poll
  uint32_t length = 0;
};

}  // namespace asyncfabric
