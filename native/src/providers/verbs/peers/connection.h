// connection.h: a connection that we opened to a rail of a peer: two lanes, the messages that wait, and the peer's credits. Made on
// the control thread, then the lock holder's; the service thread reads only what is const. The engine holds a handle, which may outlive
// the rail and may be dropped on any thread.
#pragma once

#include <atomic>
#include <deque>
#include <memory>

#include "provider/provider.h"
#include "providers/verbs/peers/handover.h"
#include "providers/verbs/transfers/lane.h"

namespace asyncfabric::verbs {

struct WaitingMessage {
  uint64_t tag = 0;
  uint32_t send_slot = kNoSlot;
  uint32_t length = 0;
  bool quiet = false;
};

struct Connection {
  Connection(uint64_t number, const RailAddress& address, uint64_t deadline)
      : id(number), remote(address), connect_until_ns(deadline) {}

  const uint64_t id;         // random; names the connection in datagrams
  const RailAddress remote;  // as it was when we connected
  const uint64_t connect_until_ns;

  std::array<Lane, kLanes> lanes;
  std::deque<WaitingMessage> waiting;  // messages that have no credit, no room, or no queue pair yet
  std::deque<WaitingMessage> again;    // those that a broken queue pair gave back
  uint32_t messages_sent = 0;          // over the present queue pair
  uint32_t messages_taken = 0;         // the peer's word about them
  uint32_t window = 0;                 // how many may be under way
  uint32_t slot = kNoSlot;             // in the rail's table, once there is a queue pair
  bool met = false;                    // it was ready once
  uint32_t life = 0;                   // of the peer's device, that the queue pairs belong to
  bool closed = false;                 // disconnected: new requests fail at once
  bool path_down = false;              // the engine has the report that nothing gets through
  bool unproven = false;               // the port came back, and nothing was answered since
  bool listed = false;                 // is among the rail's connections with waiting messages
  RailPeer* handle = nullptr;          // set before anybody else sees the connection
  std::atomic<bool> abandoned{
      false};  // partner: ~PeerHandle on any thread; the lock's holder looks before it names the handle

  bool may_send_message() const { return messages_sent - messages_taken < window; }
};

class PeerHandle final : public RailPeer {
 public:
  PeerHandle(std::shared_ptr<Connection> c, std::shared_ptr<Handover> h)
      : connection(std::move(c)), handover_(std::move(h)) {
    connection->handle = this;
  }
  ~PeerHandle() override {
    connection->abandoned.store(true, std::memory_order_release);
    News news;
    news.kind = NewsKind::kAbandoned;
    news.connection = connection;
    handover_->post(std::move(news));
  }
  bool lost() const override { return connection->closed; }
  PeerHandle(const PeerHandle&) = delete;
  PeerHandle& operator=(const PeerHandle&) = delete;

  const std::shared_ptr<Connection> connection;

 private:
  std::shared_ptr<Handover> handover_;
};

inline Connection& connection_of(RailPeer* peer) { return *static_cast<PeerHandle*>(peer)->connection; }

}  // namespace asyncfabric::verbs
