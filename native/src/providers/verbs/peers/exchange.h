// exchange.h: the service thread of a verbs rail: builds queue pairs with the service threads of other rails, and reads the device's
// events. Creating and connecting queue pairs are slow system calls, so none of them ever runs under the engine lock.
//   us: make queue pairs       kRequest(both ends, random PSNs) ---->  make the other ends, ready to receive
//   ready to receive and send  <---- kReply(their ends, credits)
// One round trip. A request is repeated until it is answered, a repeated one gets the same answer, and answers to an earlier attempt are
// dropped, so lost, doubled and crossing datagrams are harmless. A broken lane takes the same way with the next attempt number.
// reopening.cc has what happens when the device fails: it is opened again, which gives this end another address and its keys other numbers.
//   us: kMoved(their connection, our address)  ---->  build it again there, as lanes that broke
//   the number of this key now?  <---- kAskKey, before its first use in the new life
// A stranger moves nobody: the number of a connection is known to its two ends alone.
#pragma once

#include <deque>
#include <initializer_list>
#include <map>
#include <memory>
#include <set>
#include <thread>

#include "providers/verbs/memory/memory.h"
#include "providers/verbs/peers/connection.h"
#include "providers/verbs/peers/handover.h"
#include "providers/verbs/peers/postbox.h"
#include "providers/verbs/transfers/queues.h"

namespace asyncfabric::verbs {

constexpr uint8_t kAllLanes = (1u << kLanes) - 1;
constexpr uint32_t kWindow = 8;          // messages that one connection may have under way
constexpr uint32_t kSpareSlots = 64;     // receives for signals on the lane that they share with messages
constexpr uint32_t kMaxWindows = 256;    // connections with receives of their own; more share the spare ones
constexpr uint32_t kMaxPeers = 1024;     // in each direction: the completion queue has room for the credits of so many
constexpr uint32_t kSignalDepth = 128;   // requests of the lane of small signals
constexpr uint32_t kCreditReceives = 4;  // receives of a sender's end, for credits
constexpr uint32_t kCreditSends = 4;     // credits that a receiver's end may have under way
constexpr uint32_t kInlineBytes = 220;

class Exchange {
 public:
  Exchange(Device& device, const Queues& queues, std::unique_ptr<Postbox> box, std::shared_ptr<Registry> registry,
           std::shared_ptr<ReceiveBlock> sends, std::shared_ptr<Handover> handover);
  ~Exchange();  // sends goodbye and joins
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  const RailAddress& address() const { return address_; }
  Status start(std::string* detail);

 private:
  // A connection that we make, while we make it; and all that is left of it later.
  struct Outgoing {
    std::shared_ptr<Connection> connection;
    RailAddress to;  // as it is now
    uint32_t attempt = 0;
    uint8_t asked = 0;   // lanes of the attempt that is under way; 0: none is
    uint8_t wanted = 0;  // lanes that broke meanwhile
    bool met = false;    // it was built once
    bool closing = false;
    uint32_t byes = 0;
    std::array<QueuePair, kLanes> pairs;
    uint64_t next_try_ns = ~0ull;
    uint64_t gap_ns = 0;
    std::vector<std::shared_ptr<KeyNumber>> asking;  // keys whose number in the new life we want to know
    uint64_t next_ask_ns = ~0ull;
  };
  // The other ends of a peer's connection.
  struct Incoming {
    uint32_t attempt = 0;
    bool has_window = false;
    RailAddress sender;
    std::array<QueuePair, kLanes> pairs;
    std::string answer;
  };
  // A connection of a peer that leads to our old address, until it is built again.
  struct Moved {
    RailAddress peer;
    uint32_t tries = 0;
    uint64_t next_try_ns = 0;
    uint64_t gap_ns = 0;
  };

  void run();
  bool watch(std::initializer_list<int> descriptors) const;
  void move_in();
  void take_jobs();
  void take_device_events();
  void look_at_address();
  void judge_rail(Status why);
  uint64_t do_timers(uint64_t now);

  // outgoing
  void begin(Outgoing& out, uint8_t lanes);
  Status build(Outgoing& out, uint8_t lanes);
  void try_again(Outgoing& out, uint64_t now);
  void take_reply(const Datagram& reply);
  void give_up(Outgoing& out, Status status);
  void ask_keys(Outgoing& out, uint64_t now);
  void take_number(const Datagram& reply);
  void take_moved(const Datagram& moved);

  // incoming
  void take_datagram(std::string_view bytes);
  void take_request(const Datagram& request);
  Status answer(Incoming& in, const Datagram& request, Datagram* reply);
  void forget(QueuePair pair);
  void end_incoming(uint64_t connection);
  void shut_out(uint64_t connection);
  void take_bye(const Datagram& bye);
  void answer_key(const Datagram& question);
  void post(const RailAddress& to, Datagram datagram);

  // reopening.cc
  void bury(Job& job);
  void try_to_open(uint64_t now);
  Status open_again(std::shared_ptr<Queues>* queues, std::string* why);
  void send_moved(uint64_t now, uint64_t* next);

  Device& device_;
  const Queues* queues_;
  std::unique_ptr<Postbox> box_;  // none while the device has failed
  std::shared_ptr<Registry> registry_;
  std::shared_ptr<ReceiveBlock> sends_;
  std::shared_ptr<Handover> handover_;
  RailAddress address_;
  UniqueFd epoll_;
  std::map<uint64_t, Outgoing> outgoing_;
  std::map<uint64_t, Incoming> incoming_;
  std::map<uint32_t, QueuePair> retiring_;  // by number: the lock's holder may still know them
  std::deque<uint64_t> shut_out_;           // connections that are refused, the newest last
  std::map<uint64_t, Moved> moved_;
  uint64_t open_at_ns_ = ~0ull;  // while the device has failed and nothing of ours is in it
  uint64_t open_gap_ns_ = 0;
  bool link_down_ = false;
  bool address_gone_ = false;
  bool failed_ = false;
  uint64_t look_again_ns_ = ~0ull;  // while the address is gone
  uint32_t windows_ = 0;            // blocks of receives that were made
  uint32_t free_windows_ = 0;       // ... and whose connection ended
  std::thread thread_;
};

}  // namespace asyncfabric::verbs
