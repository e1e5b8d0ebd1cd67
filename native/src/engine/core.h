// core.h: the engine's state and its one verb, step(). Everything in Core is guarded by the engine lock unless it states otherwise.
// What it does stands in the rooms: ops/ (from a submitted op over legs and work requests to its completion; cancel, loss, close), peers/
// (connections, liveness, messages), counters/ (values, and their end), regions/ (memory, and is a key still good), loop/ (the pass itself).
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "asyncfabric/types.h"
#include "base/clock.h"
#include "base/engine_lock.h"
#include "base/mailbox.h"
#include "base/slab.h"
#include "base/spsc_ring.h"
#include "base/trace.h"
#include "base/wake_gate.h"
#include "engine/control.h"
#include "engine/counters/closings.h"
#include "engine/counters/counters.h"
#include "engine/counters/generations.h"
#include "engine/counters/watch.h"
#include "engine/loop/poll_turn.h"
#include "engine/loop/rail_watch.h"
#include "engine/ops/op.h"
#include "engine/ops/post_batch.h"
#include "engine/peers/admission.h"
#include "engine/peers/bundle.h"
#include "engine/peers/inbox.h"
#include "engine/peers/peer_list.h"
#include "engine/regions/rail_calls.h"
#include "engine/regions/region.h"

namespace asyncfabric {

constexpr uint64_t kShortestNapNs = 50'000;
constexpr uint64_t kLongestNapNs = 5'000'000;
constexpr uint64_t kIdleNapNs = 20'000'000;     // what naps grow to within a second of silence
constexpr uint64_t kLoopNaps = 10;              // naps are so much longer while the loop has the rails
constexpr uint64_t kControlTurnNs = 1'000'000;  // the first look of a control call that waits for peers
constexpr uint64_t kStrangersTurnNs = 50'000;   // likewise, of what a stranger asks for
constexpr uint64_t kQuarantineLookNs = 500'000'000;
constexpr uint64_t kPulseNs = 50'000'000;
constexpr uint64_t kBulkBytes = 256 * 1024;  // completions of so much may reach the loop a few passes later
constexpr uint32_t kRingDelay = 3;           // passes

struct RailState {
  std::unique_ptr<Rail> rail;
  Capabilities capabilities;
  std::string protocol;
  std::string reason;  // why it was opened
  double weight = 1;
  std::atomic<bool> up{true};  // relaxed: written under the engine lock, read by rails()
  // Regions of this rail's GPU that rails of NICs may write to; partner: add_region before keys exist, any thread before a flag is raised.
  std::atomic<uint32_t> nic_regions{0};
  LegQueue urgent;  // counts and messages: never behind bulk data
  LegQueue bulk;
};

// Written under the engine lock (one writer at a time), read by statistics().
struct Tally {
  std::atomic<uint64_t> value{0};
  void add(uint64_t n) { value.store(value.load(std::memory_order_relaxed) + n, std::memory_order_relaxed); }
  void take_one() { value.store(get() - 1, std::memory_order_relaxed); }
  uint64_t get() const { return value.load(std::memory_order_relaxed); }
};

struct Tallies {
  Tally ops_completed, ops_failed, ops_cancelled, bytes_written, bytes_read, work_requests, immediates_sent,
      immediates_received, stale_arrivals, early_arrivals, messages_received, messages_refused, steps, sleeps,
      loop_wakes, inline_steps, quarantined;
};

struct OutgoingMessage {
  PeerId peer = 0;
  uint32_t lane = 0;
  std::string bytes;
  bool any_lane = true;  // false: it is about that lane
  bool urgent = false;   // see WorkRequest
};

struct Core {
  explicit Core(const EngineConfig& engine_config);
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  // ---- any thread
  const EngineConfig config;
  const uint64_t incarnation;
  const uint64_t host;
  std::string address() const;
  Status note_address();  // when rails open, and after one of them opened its device again: engine lock
  std::vector<std::unique_ptr<RailState>> rails;
  std::vector<LeftOutRail> left_out;  // optional rails that could not be opened
  bool any_synchronous = false;
  // Connected over rails that want a thread which stays until their bytes have moved. Relaxed: written under the engine lock, a hint elsewhere.
  std::atomic<uint32_t> asynchronous_peers{0};
  EngineLock engine_lock;
  Mailbox mailbox;     // submitted ops
  Mailbox cancels;     // Op::cancel_link
  PageRoom page_room;  // outlives the ops, whose lists lie in it
  Slab<Op> ops;
  WakeGate gate;       // wakes the worker
  WakeGate loop_gate;  // wakes the event loop
  RailWatch rail_watch;
  bool can_hand_over = false;     // adaptive, some rail moves bytes in post(), and none lacks a descriptor
  std::atomic<uint64_t> arms{0};  // relaxed: how often the loop went to sleep, for the worker's guess
  PollTurn poll_turn;
  SpscRing<Completion> ring;
  std::atomic<uint64_t> submitted{0};
  std::atomic<uint64_t> consumed{0};
  std::atomic<bool> closing{false};
  std::atomic<bool> backlogged{false};
  std::atomic<bool> writable_wanted{false};  // partner: arm_writable sets, the lock's holder clears
  std::mutex writable_mutex;
  std::vector<uint64_t> writable_cookies;  // who waits for room; guarded by writable_mutex
  mutable std::mutex address_mutex;
  std::string own_address;  // guarded by address_mutex
  mutable std::mutex error_mutex;
  std::string last_error;                   // newest failed control call, in words; guarded by error_mutex
  std::map<uint64_t, std::string> reasons;  // why data calls failed, by cookie; the newest few; guarded by error_mutex
  RegionTable regions;
  KeyTable keys;
  SharedWords words;
  CounterTable counters;
  WatchTable watches{words};
  Trace trace;
  Tallies tallies;
  mutable std::mutex keys_mutex;  // rail keys and generations of regions
  Inbox inbox;                    // received user messages
  std::mutex marks_mutex;
  std::unordered_map<uint64_t, std::unique_ptr<StreamMark>>
      marks;               // made, and not yet part of an op; guarded by marks_mutex
  uint64_t next_mark = 1;  // likewise
  Control control;

  // ---- engine lock
  std::unordered_map<uint64_t, Peer*> peer_of_incarnation;
  PeerList peers;
  Admission admission;
  std::deque<OutgoingMessage> outgoing;
  BundleRoom bundle_room;
  PostBatch batch;
  std::vector<Op*> marked;  // parked until a stream of the user has passed their mark
  std::vector<Completion> backlog;
  bool ring_owed = false;   // completions are published, and the loop was not rung for them yet
  bool hurry = false;       // something else than bulk is among them
  uint32_t ring_delay = 0;  // passes since the ring is owed
  Op* live_first = nullptr;
  uint64_t live_count = 0;
  uint64_t draining = 0;  // ops with a drain deadline
  uint64_t next_tick_ns = 0;
  uint64_t nap_ns = kShortestNapNs;  // for rails without a descriptor: grows while nothing happens
  uint64_t arms_seen = 0;
  uint32_t vain_sleeps = 0;        // of the worker, before the loop may have the rails again: they woke it in vain
  uint64_t worker_until_ns = 0;    // when the worker that sleeps will look by itself
  bool nic_writes_unseen = false;  // immediates of NICs came, and what they announce may not be visible to kernels
  uint64_t close_cookie = 0;
  uint64_t close_until_ns = 0;
  bool close_pending = false;
  bool close_hurries = false;  // what is not posted is cancelled

  // Any thread. All peers are reached by rails that move bytes in post(), so no cycles of ours are needed behind it.
  bool moves_at_once() const { return any_synchronous && asynchronous_peers.load(std::memory_order_relaxed) == 0; }
  bool may_hand_over() const { return can_hand_over && moves_at_once(); }

  // step.cc
  size_t step();
  bool settled() const;  // false: a sleeping worker has to be woken
  bool can_sleep();      // true: nothing to do until something rings
  bool loop_may_have_rails() const;
  bool loop_takes_rails();
  uint64_t sleep_limit_ns(bool loop_has_rails);
  void publish(const Completion& completion);
  bool has_room() const;  // one more op would be taken
  void notify_writable();
  void note_error(std::string text);  // any thread
  void note_reason(uint64_t cookie, const std::string& text);
  void flush_completions();
  void ring_loop();
  bool bulk_waits() const;  // a rail has more to post than fitted into this pass

  // start.cc
  void start(Op& op);
  void restart_parked(Peer& peer);
  void plan(Op& op);
  size_t start_marked();
  bool open(const Lane& lane) const { return !lane.closed && rails[lane.rail]->up.load(std::memory_order_relaxed); }
  bool usable(const Lane& lane) const { return open(lane) && !lane.down; }
  // Both ends have registered the op's memory with the lane's rails.
  bool carries(const Op& op, const Target& target, const Lane& lane) const;
  void note_no_rail(const Op& op, const Target& target);
  LegQueue& queue_of(const Leg& leg);
  void enqueue(Op& op, uint32_t target, uint32_t lane, uint64_t begin, uint64_t end, bool counts_only);

  // post.cc
  size_t post(uint32_t rail);
  void posted(Leg& leg, uint32_t rail, uint64_t bytes, bool signalled);

  // events.cc
  size_t poll(uint32_t rail);
  void on_done(uint64_t tag, Status status);
  void request_ended(Leg& leg, Status status, bool signalled);
  void on_immediate(uint32_t imm32);
  bool nics_write_to_gpus() const;
  Status flush_nic_writes();  // any thread
  void leg_ended(Leg& leg);
  void count_fenced(Op& op, const Leg& last);
  void finish(Op& op);
  void retire(Op& op);

  // drain.cc
  void cancel(Op& op);
  template <class Chosen>
  void cancel_where(Chosen chosen) {
    for (Op* op = live_first; op != nullptr;) {
      Op* after = op->live_after;  // cancelling may end this op, and no other
      if (chosen(*op)) cancel(*op);
      op = after;
    }
  }
  void drop_leg(Leg& leg);
  void fail_target(Op& op, uint32_t target, Status status);
  void fail_op(Op& op, Status status, PeerId peer);
  void start_draining(Op& op);
  void drain_expired(Op& op);
  void quarantine(Op& op);
  void rail_down(uint32_t rail, Status status);
  void path_changed(const RailPeer* path, bool down);
  uint32_t way_round(const Peer& peer, uint32_t avoided, const Leg* data = nullptr) const;
  void go_round(Leg& leg);
  void begin_close(uint64_t cookie, bool cancel_unposted);
  void hurry_close();
  void end_waiting();
  void advance_close(uint64_t now);

  // peers.cc
  Peer* find_peer(PeerId id) const { return peers.find(id); }
  Peer& make_peer(uint64_t peer_incarnation, std::string peer_address);
  Peer* peer_for_key(RemoteKey& key);
  Peer* to_use(Peer* named);
  void connect(Peer& peer);   // opens lanes
  void activate(Peer& peer);  // opens lanes and shakes hands until the deadline
  void connected(Peer& peer);
  void connect_to(uint64_t cookie, const AddressBlob& blob, const std::string& bytes);
  void connect_failed(Peer& peer, Status status);
  void on_peer_lost(Peer& peer, Status status);  // a rail has seen its end
  void lose_peer(Peer& peer, Status status, PeerState state);
  void give_up(Peer& peer, Status status, PeerState state);
  bool reap(Peer& peer);
  void note_asynchronous(Peer& peer, bool asynchronous);
  void forget(const Peer& peer);
  void tick(uint64_t now);
  uint64_t check_pulse(Peer& peer, uint64_t now);

  // attaching.cc
  struct Attaching;
  void attach(KeyTable::Slot& key, Peer& peer);
  void go_on_attaching(const std::shared_ptr<Attaching>& job);
  void attached(Attaching& job);
  void fail_parked_on(Peer& peer, KeyTable::Slot* key, Status status, const std::string& why = {});

  // handshake.cc
  struct Wiring;
  void wire_peer(PeerId id);  // this one and the next three: control thread
  bool choose_protocol(Wiring& wiring);
  void go_on_wiring(const std::shared_ptr<Wiring>& wiring);
  void wired(Wiring& wiring);
  static uint64_t connect_patience(const RailState& rail, const Pauses& pauses, uint64_t left_ns, uint64_t first_ns) {
    return !rail.capabilities.resumes_connect ? left_ns : pauses.latest_ns == 0 ? std::min(left_ns, first_ns) : 0;
  }
  void send_hello(Peer& peer);
  void on_hello(const MessageHeader& header, std::string_view payload, Inbound inbound);
  void on_welcome(Peer& peer, const MessageHeader& header, std::string_view payload);
  static bool is_answered(Peer& peer, uint64_t their_lane);
  void answer_hello(Peer& peer, uint64_t their_lane);
  void send_welcome(Peer& peer, uint64_t their_lane);

  // admission.cc
  bool has_secret() const { return !config.secret.empty(); }
  void send_sealed(Peer& peer, uint32_t lane, MessageType type, uint64_t value, std::string payload);
  bool unseal_message(const MessageHeader& header, Inbound inbound, std::string_view* payload) const;
  bool belongs(Peer& peer, Inbound inbound);
  bool admit(Peer& peer, Inbound inbound);
  bool has_room_for_hello(Inbound inbound) const;
  void challenge(Peer& peer, uint64_t their_lane);
  void on_challenge(const MessageHeader& header, std::string_view payload, Inbound inbound);
  void on_proof(const MessageHeader& header, std::string_view payload, Inbound inbound);
  void on_reject(const MessageHeader& header, std::string_view payload, Inbound inbound);
  void on_refused(const MessageHeader& header, std::string_view payload);
  Peer* peer_behind(const MessageHeader& header);
  void refuse_hello(const MessageHeader& hello, const AddressBlob& from, const secret::Nonce& nonce,
                    SecretMismatch why);
  struct RefusalPath {
    uint64_t number = 0, until_ns = 0;
    AddressBlob to;
    Pauses pauses;
  };
  void connect_refusal(const std::shared_ptr<RefusalPath>& path);  // control thread
  void advance_refusals(uint64_t now);

  // key_verdicts.cc
  void ask_key(KeyTable::Slot& key, Peer& peer);
  void ask_again(Peer& peer, uint64_t now);
  void on_ask_key(Peer& peer, const MessageHeader& header, std::string_view payload);
  void on_key_verdict(Peer& peer, const MessageHeader& header, std::string_view payload);
  void on_revoked(Peer& peer, const MessageHeader& header, std::string_view payload);
  void announce_revoked(RegionId region, uint64_t first_good);

  // messages.cc
  void send_message(Peer& peer, uint32_t lane, MessageType type, uint64_t value, std::string_view payload);
  size_t flush_outgoing();
  void on_message(std::string_view bytes, Inbound inbound);
  bool send_again(Op& op, Leg& leg, Status status);
  void remind_later(Peer& peer);
  uint64_t remind(Peer& peer, uint64_t now);
  void on_user_messages(Peer& peer, const MessageHeader& header, std::string_view payload);
  void credit_senders();
  void send_credit(Peer& peer);
  void on_ask_credit(Peer& peer, uint64_t known);
  void wants_credit(Peer& peer, bool wants);
  void ask_credit(Peer& peer);
  void on_credit(Peer& peer, uint64_t taken);
  void end_untaken(Peer& peer);

  // closings.cc
  void report_closings();
  void send_closings(Peer& peer, uint64_t number, const Closings& closings);
  void ask_closings(Peer& peer);
  void closing_confirmed(uint32_t imm);
  void forget_closings(Peer& peer);
  void on_closings(Peer& peer, const MessageHeader& header, std::string_view payload);
  void on_closings_confirmed(Peer& peer, const MessageHeader& header, std::string_view payload);
  void take_closings();
  void release_closings(Op& op);
  void confirm_closings(Peer& peer, uint64_t number);
  Peer* peer_of(const Target& target) const;
  void stamp(Op& op);
  void learn_generations(Peer& peer, std::string_view slice);
  Generations generations;  // of our counters, of the next opening where one is closed
  struct Unconfirmed {
    uint32_t peers = 0;  // that have not confirmed
    uint64_t since_ns = 0;
    std::vector<uint64_t> cookies;  // who wants to open it again
  };
  std::unordered_map<uint32_t, Unconfirmed> unconfirmed;  // closed imms of ours
  struct ClosingsThere {
    PeerId peer = 0;
    uint32_t life = 0;
    uint64_t number = 0;
    Closings closings;
  };
  std::vector<ClosingsThere> closings_there;  // of peers' counters, until what was submitted before them was started
  struct ClosingsHeld {
    Op* op = nullptr;
    PeerId peer = 0;
    uint32_t life = 0;
    uint64_t number = 0;
  };
  std::vector<ClosingsHeld> closings_held;  // lists that wait for ops of ours

  // regions.cc (control thread)
  void end_region(RegionTable::Slot* slot);
  void region_ended(RegionTable::Slot* slot, Status status);
  void forget_region(RegionTable::Slot* slot);
  void look_at_quarantined(RegionTable::Slot* slot);
  void release_started(RegionTable::Slot* slot);  // engine lock
  void expire_releases(uint64_t now);             // engine lock
  void end_key(KeyTable::Slot* slot);
  void unpin_region(RegionTable::Slot* slot);
  void unpin_key(KeyTable::Slot* slot);
  std::unordered_map<uint64_t, uint64_t> releases;  // region handle -> cookie of its release; guarded by keys_mutex
  std::unordered_map<uint64_t, uint64_t> release_until;  // region handle -> when its ops are cancelled; likewise

  // Runs a rail's control call: beside the engine lock when the rail allows it, else under the engine lock.
  template <class Call>
  auto at_rail(uint32_t rail, Call call) {
    if (rails[rail]->capabilities.concurrent_control) return call(*rails[rail]->rail);
    EngineLock::Caller caller(engine_lock);
    const std::lock_guard lock(caller);
    auto result = call(*rails[rail]->rail);
    gate.notify();  // the rail may have met events meanwhile
    return result;
  }

  // The same for a call that may wait for peers. Control thread.
  void call_rails(const std::shared_ptr<RailCalls>& calls);
  size_t rail_calls = 0;  // that have not ended. Control thread
};

// A moment under the engine lock for a thread that is not the worker (a control job, a call that must touch engine state). What it published
// goes out when it ends, and the worker looks again: a completion left staged while the worker sleeps would never arrive.
class Moment {
 public:
  explicit Moment(Core& core) : core_(core), caller_(core.engine_lock) { caller_.lock(); }
  ~Moment() {
    core_.flush_completions();
    caller_.unlock();
    core_.gate.notify();
  }
  Moment(const Moment&) = delete;
  Moment& operator=(const Moment&) = delete;

 private:
  Core& core_;
  EngineLock::Caller caller_;
};

// Tags of work requests: generation (20) | slot (20) | leg (23) | signalled (1). 0 is an engine message, nobody waits for it.
constexpr uint64_t make_tag(uint32_t generation, uint32_t slot, uint32_t leg, bool signalled) {
  return uint64_t{generation & 0xfffff} << 44 | uint64_t{slot & 0xfffff} << 24 | uint64_t{leg & 0x7fffff} << 1 |
         (signalled ? 1 : 0);
}

// The end of the text of an error, when it is why.
std::string no_descriptor();

}  // namespace asyncfabric
