// peer.h: what a rail knows of one connection to a peer's rail. The engine holds a PeerHandle; the state lives on in the rail
// until nothing is outstanding. Written by [control] and [engine lock] calls, which never overlap on these rails.
#pragma once

#include <memory>
#include <string>

#include "provider/provider.h"
#include "providers/libfabric/device/fids.h"
#include "providers/libfabric/peers/streams.h"
#include "providers/libfabric/peers/wire.h"
#include "providers/libfabric/transfers/contexts.h"

namespace asyncfabric::libfabric {

struct PeerState {
  RailAddress remote;
  uint64_t connection = 0;   // random; names this connection in introductions and fences
  EndpointPtr own_endpoint;  // when the profile gives each peer its own
  std::string own_name;      // of that
  fid_ep* endpoint = nullptr;
  fi_addr_t address = FI_ADDR_UNSPEC;
  Stream stream;               // that libfabric opened to it, where that could be found out
  ContextList requests;        // posted and not reported, in order
  Context* backlog = nullptr;  // the first of them that libfabric has not taken
  uint64_t last_sequence = 0;  // given to the newest submitted request
  uint64_t asked = 0;          // newest one that asks for the target's word
  uint64_t acknowledged = 0;   // everything up to here arrived
  uint64_t open_bytes = 0;     // of requests that libfabric holds
  uint64_t unasked_bytes = 0;  // submitted behind the newest one that asks
  uint32_t asks_in_flight = 0;
  uint32_t post_mark = 0;      // the post() that saw this peer last
  uint32_t question_mark = 0;  // the post() whose last request of this peer asks for others too
  uint32_t outstanding = 0;
  uint32_t submitted = 0;
  uint64_t next_probe_ns = 0;  // when a broken connection is looked into again
  // Until it takes its first request:
  uint64_t first_try_ns = 0;
  uint64_t next_try_ns = 0;    // the longer it does not, the more rarely it is tried
  uint64_t next_knock_ns = 0;  // when to ask whether anybody listens there
  // Its stream broke and nothing shows yet whether it lives: requests that failed with the stream are kept until something does, or until
  // then. 0: no doubt.
  uint64_t doubted_until_ns = 0;
  uint64_t broke_at = 0;  // last_sequence when the stream broke: what is confirmed behind it proves that the peer lives
  bool in_backlog = false;     // is in the rail's list of peers with a backlog
  bool closed = false;         // disconnected: new requests fail at once
  bool broken = false;         // its endpoint is to be replaced at the end of this pass
  bool lost = false;           // it is gone
  RailPeer* handle = nullptr;  // the engine's; null: given back, or the rail opened this connection itself

  // Takes the first one out of the backlog, and what failed at once behind it. Before finish() of that one, which takes all of these out of
  // `requests`: a backlog that still named one would lead into the pool's free contexts.
  Context* leave_backlog() {
    Context* const first = backlog;
    do backlog = backlog->next;
    while (backlog != nullptr && backlog->done);
    return first;
  }
};

class PeerHandle final : public RailPeer {
 public:
  explicit PeerHandle(std::shared_ptr<PeerState> s) : state(std::move(s)) { state->handle = this; }
  ~PeerHandle() override { state->handle = nullptr; }
  bool lost() const override { return state->lost; }
  const std::shared_ptr<PeerState> state;
};

inline PeerState* state_of(RailPeer* peer) { return static_cast<PeerHandle*>(peer)->state.get(); }

}  // namespace asyncfabric::libfabric
