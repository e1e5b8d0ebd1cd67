// loopback_rail.h: an in-memory rail for tests. Rails of one process find each other in a process-wide hub; no kernel, no NIC.
// Deterministic: requests wait in the queue of the posting rail and are executed by its poll(), in posted order when `ordered`, in seeded
// random order otherwise. With `early` an unordered rail reports a request whose `delivered` is false as done as soon as its bytes are
// copied out, and lets them land at a later poll, as a NIC may. Threads: any; one lock in the hub orders everything, also for two workers.
// Options: ordered=0|1 (1), seed, early=0|1 (0), read=0|1 (1), depth=<requests> (1024), flush=0|1 (1), fd=0|1 (1), burst=<requests> (64: per
// poll), loss=0|1 (1: reports_peer_loss), request_bytes=, gpu_request_bytes=<most>, host=0|1 (0), takes=0|1 (1: registers), opens=0|1 (1).
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "provider/provider.h"
#include "rigs/loopback_gpu.h"
#include "rigs/loopback_hub.h"

namespace asyncfabric::testing {

class LoopbackRail : public Rail, public LoopbackGpu {
 public:
  explicit LoopbackRail(const RailSpec& spec) : hub_(LoopbackHub::shared()) {
    info_.provider = "loopback";
    info_.device = spec.device;
    capabilities_.ordered = option(spec, "ordered", 1) != 0;
    capabilities_.read = option(spec, "read", 1) != 0;
    capabilities_.concurrent_control = true;
    capabilities_.reports_peer_loss = option(spec, "loss", 1) != 0;
    capabilities_.max_request_bytes = option(spec, "request_bytes", 1ull << 30);
    capabilities_.max_gpu_request_bytes = option(spec, "gpu_request_bytes", 0);
    capabilities_.same_host_only = option(spec, "host", 0) != 0;
    takes_ = option(spec, "takes", 1) != 0;
    early_ = option(spec, "early", 0) != 0 && !capabilities_.ordered;
    flushes_ = option(spec, "flush", 1) != 0;
    depth_ = option(spec, "depth", 1024);
    burst_ = option(spec, "burst", 64);
    random_.seed(option(spec, "seed", 1));
    if (option(spec, "fd", 1) != 0) fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    info_.ordered = capabilities_.ordered;
    info_.can_read = capabilities_.read;
    const std::lock_guard<std::mutex> guard(hub_.lock);
    number_ = hub_.next_rail++;
    hub_.rails[number_] = this;
  }

  ~LoopbackRail() override {
    {
      const std::lock_guard<std::mutex> guard(hub_.lock);
      vanish();
    }
    if (fd_ >= 0) close(fd_);
  }

  const Capabilities& capabilities() const override { return capabilities_; }
  RailInfo info() const override { return info_; }
  std::string address() const override {
    const std::lock_guard<std::mutex> guard(hub_.lock);
    return moved_.empty() ? "loop" + bytes_of(number_) : moved_;
  }

  Status register_memory(const Memory& memory, std::unique_ptr<LocalMemory>* out, std::string* key) override {
    if (!takes_) return StatusCode::kNoMemory;
    const std::lock_guard<std::mutex> guard(hub_.lock);
    auto local = std::make_unique<LoopbackLocal>();
    local->region = next_region_++;
    LoopbackRegion& region = regions_[local->region];
    region.base = static_cast<uint8_t*>(memory.base);
    region.length = memory.length;
    region.access = memory.access;
    shown_dmabuf_ = memory.dmabuf;
    *key = key_of(local->region, region.generation);
    *out = std::move(local);
    return {};
  }

  Status narrow_key(LocalMemory& memory, const KeyScope&, std::string* key) override { return number(memory, 0, key); }
  Status revoke_memory(LocalMemory& memory, uint64_t, std::string* key) override { return number(memory, 1, key); }
  Status number(LocalMemory& memory, uint64_t later, std::string* key) {
    const std::lock_guard<std::mutex> guard(hub_.lock);
    const uint64_t region = static_cast<LoopbackLocal&>(memory).region;
    *key = key_of(region, regions_[region].generation += later);
    return {};
  }
  Status release_memory(std::unique_ptr<LocalMemory>& memory, uint64_t) override {
    const std::lock_guard<std::mutex> guard(hub_.lock);
    regions_.erase(static_cast<LoopbackLocal&>(*memory).region);
    memory.reset();
    return {};
  }

  Status connect(std::string_view address, uint64_t, std::unique_ptr<RailPeer>* out) override {
    std::unique_lock<std::mutex> guard(hub_.lock);
    if (address.size() != 12 || address.substr(0, 4) != "loop") return StatusCode::kInvalidArgument;
    const uint64_t rail = number_in(address.substr(4));
    if (!hub_.rails.contains(rail)) return StatusCode::kPeerUnreachable;
    auto peer = std::make_unique<LoopbackPeer>();
    peer->owner = number_;
    peer->rail = rail;
    peer->connection = ++hub_.connections;
    peers_.push_back(peer.get());
    *out = std::move(peer);
    const std::function<void()> behind = hub_.behind_connect;
    guard.unlock();
    if (behind) behind();
    return {};
  }

  GpuRail* gpu() override { return this; }

  int shown_dmabuf() const { return shown_dmabuf_; }  // with the newest registration

  // From now on attach() refuses, for this reason; "" ends that.
  void refuse(const std::string& why) {
    const std::lock_guard<std::mutex> guard(hub_.lock);
    why_ = why;
  }
  std::string why() const override {
    const std::lock_guard<std::mutex> guard(hub_.lock);
    return why_;
  }

  Status attach(RailPeer& peer, std::string_view key, uint64_t, std::unique_ptr<RemoteMemory>* out) override {
    if (!why().empty()) return StatusCode::kUnsupported;
    if (key.size() != 28 || key.substr(0, 4) != "lkey") return StatusCode::kInvalidArgument;
    if (number_in(key.substr(4)) != static_cast<LoopbackPeer&>(peer).rail) return StatusCode::kInvalidArgument;
    auto remote = std::make_unique<LoopbackRemote>();
    remote->region = number_in(key.substr(12));
    remote->generation = number_in(key.substr(20));
    *out = std::move(remote);
    return {};
  }

  Status disconnect(RailPeer& peer) override {
    const std::lock_guard<std::mutex> guard(hub_.lock);
    std::erase(peers_, &peer);
    if (!flushes_) return StatusCode::kUnsupported;
    std::deque<Item> kept;
    for (Item& item : queue_) {
      if (item.request.peer != &peer) {
        kept.push_back(std::move(item));
      } else if (!item.reported) {
        done(item.request.tag, StatusCode::kPeerDead);
      }
    }
    queue_.swap(kept);
    return {};
  }

  void shut_out(uint64_t connection) override {
    const std::lock_guard<std::mutex> guard(hub_.lock);
    shut_out_.insert(connection);
    std::erase_if(events_, [&](const Queued& queued) { return queued.event.connection == connection; });
  }

  PostResult post(std::span<const WorkRequest> requests) override {
    const std::lock_guard<std::mutex> guard(hub_.lock);
    PostResult result;
    for (const WorkRequest& request : requests) {
      if (queue_.size() >= depth_) {
        result.status = StatusCode::kBusy;
        break;
      }
      if (request.kind == WorkKind::kSend && request.length > capabilities_.max_send_bytes) {
        result.status = StatusCode::kOutOfBounds;  // as rails do: nothing of it leaves
        break;
      }
      Item item;
      item.request = request;
      item.rail = static_cast<LoopbackPeer*>(request.peer)->rail;
      item.connection = static_cast<LoopbackPeer*>(request.peer)->connection;
      if (request.remote != nullptr) {
        item.region = static_cast<LoopbackRemote*>(request.remote)->region;
        item.generation = static_cast<LoopbackRemote*>(request.remote)->generation;
      }
      if (request.kind == WorkKind::kSend) copy_out(item);
      queue_.push_back(std::move(item));
      ++result.accepted;
      ++posted_;
    }
    return result;
  }

  size_t poll(std::span<RailEvent> events) override {
    const std::lock_guard<std::mutex> guard(hub_.lock);
    if (!held_) execute(burst_);
    messages_.clear();
    size_t count = 0;
    while (!deaf_ && count < events.size() && !events_.empty()) {
      events[count] = events_.front().event;
      if (events[count].kind == RailEventKind::kMessage) {
        messages_.push_back(std::move(events_.front().bytes));
        events[count].data = reinterpret_cast<const uint8_t*>(messages_.back().data());
        events[count].length = static_cast<uint32_t>(messages_.back().size());
      }
      events_.pop_front();
      ++count;
    }
    return count;
  }

  int wait_fd() const override { return fd_; }

  bool prepare_wait() override {
    const std::lock_guard<std::mutex> guard(hub_.lock);
    if ((!deaf_ && !events_.empty()) || (!held_ && !queue_.empty())) return false;
    armed_ = true;
    return true;
  }

  void cancel_wait() override {
    const std::lock_guard<std::mutex> guard(hub_.lock);
    armed_ = false;
    uint64_t word = 0;
    if (fd_ >= 0 && read(fd_, &word, sizeof word) < 0) return;  // EAGAIN: nobody rang
  }

  // Seams for tests.
  void hold(bool held) {  // requests stay queued while held
    const std::lock_guard<std::mutex> guard(hub_.lock);
    held_ = held;
    if (!held) ring();
  }
  void be_deaf(bool deaf) {  // what came stays where it is while deaf
    const std::lock_guard<std::mutex> guard(hub_.lock);
    deaf_ = deaf;
    if (!deaf) ring();
  }
  // Messages that this rail delivered, and the same once more.
  std::vector<std::string> delivered() const {
    const std::lock_guard<std::mutex> guard(hub_.lock);
    return delivered_;
  }
  void deliver_again(const std::string& message, LoopbackRail& to) {
    const std::lock_guard<std::mutex> guard(hub_.lock);
    RailEvent event;
    event.kind = RailEventKind::kMessage;
    to.push(event, message);
  }
  // The connection breaks under the next `count` messages: each is reported as failed, though the first `landed` of them arrived.
  void break_messages(size_t count, size_t landed) {
    const std::lock_guard<std::mutex> guard(hub_.lock);
    breaks_ = count;
    landed_ = landed;
  }
  void kill() {  // as if the process of this rail died: nobody reaches it any more, peers are notified
    const std::lock_guard<std::mutex> guard(hub_.lock);
    vanish();
  }
  void raise(RailEventKind kind) {  // of the whole rail, or of the path to each of its peers
    const std::lock_guard<std::mutex> guard(hub_.lock);
    RailEvent event;
    event.kind = kind;
    if (kind == RailEventKind::kRailDown || kind == RailEventKind::kRailUp) return push(event);
    for (LoopbackPeer* peer : peers_) {
      event.peer = peer;
      push(event);
    }
  }
  void move(const std::string& address) {  // as if its device had been opened again, with this address
    const std::lock_guard<std::mutex> guard(hub_.lock);
    moved_ = address;
  }
  uint64_t posted() const {  // requests ever accepted
    const std::lock_guard<std::mutex> guard(hub_.lock);
    return posted_;
  }
  size_t queued() const {  // requests accepted and not executed
    const std::lock_guard<std::mutex> guard(hub_.lock);
    return queue_.size();
  }

  static uint64_t option(const RailSpec& spec, std::string_view name, uint64_t fallback) {
    for (const auto& [key, value] : spec.options)
      if (key == name) return std::stoull(value);
    return fallback;
  }

 private:
  friend struct LoopbackPeer;
  struct Item {
    WorkRequest request;
    uint64_t rail = 0;  // copied out of the handles, which may be gone when a request lands late
    uint64_t connection = 0;
    uint64_t region = 0;
    uint64_t generation = 0;
    std::string copy;  // messages, and early writes: the bytes that left already
    bool copied = false;
    bool reported = false;  // early: kDone went out, only the landing is missing
  };
  struct Queued {
    RailEvent event;
    std::string bytes;
  };

  static std::string bytes_of(uint64_t number) {
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &number, 8);
    return bytes;
  }
  static uint64_t number_in(std::string_view bytes) {
    uint64_t number = 0;
    std::memcpy(&number, bytes.data(), 8);
    return number;
  }
  std::string key_of(uint64_t region, uint64_t generation) const {
    return "lkey" + bytes_of(number_) + bytes_of(region) + bytes_of(generation);
  }
  static void copy_out(Item& item) {
    item.copy.assign(static_cast<const char*>(item.request.address), item.request.length);
    item.copied = true;
  }

  // The rest runs under the hub's lock.
  void ring() {
    if (fd_ < 0 || !armed_) return;
    const uint64_t one = 1;
    if (write(fd_, &one, sizeof one) < 0) return;  // EAGAIN: it is readable already
  }
  void push(const RailEvent& event, std::string bytes = {}) {
    events_.push_back({event, std::move(bytes)});
    ring();
  }
  void done(uint64_t tag, Status status) {
    RailEvent event;
    event.kind = RailEventKind::kDone;
    event.tag = tag;
    event.status = status;
    push(event);
  }

  void vanish() {
    if (hub_.rails.erase(number_) == 0) return;
    queue_.clear();
    for (const auto& [number, rail] : hub_.rails) {
      for (LoopbackPeer* peer : rail->peers_) {
        if (peer->rail != number_ || !rail->capabilities_.reports_peer_loss) continue;
        peer->gone = true;
        RailEvent event;
        event.kind = RailEventKind::kPeerLost;
        event.peer = peer;
        event.status = StatusCode::kPeerDead;
        rail->push(event);
      }
    }
  }

  void execute(uint64_t budget) {
    for (; budget > 0 && !queue_.empty(); --budget) {
      size_t index = 0;
      if (!capabilities_.ordered) index = std::uniform_int_distribution<size_t>(0, queue_.size() - 1)(random_);
      Item item = std::move(queue_[index]);
      queue_.erase(queue_.begin() + static_cast<std::ptrdiff_t>(index));
      const WorkRequest& request = item.request;
      if (early_ && !item.reported && !request.delivered && request.kind == WorkKind::kWrite && request.length > 0) {
        copy_out(item);
        item.reported = true;
        done(request.tag, {});
        queue_.push_back(std::move(item));  // lands when it is drawn again
        continue;
      }
      const Status status = land(item);
      if (!item.reported && (request.signalled || !status.ok())) done(request.tag, status);
    }
  }

  Status land(const Item& item) {
    const WorkRequest& request = item.request;
    const auto target = hub_.rails.find(item.rail);
    if (target == hub_.rails.end()) return StatusCode::kPeerDead;
    LoopbackRail& other = *target->second;
    if (other.shut_out_.contains(item.connection)) return {};  // it arrived, and nobody looks
    if (request.kind == WorkKind::kSend) {
      const bool breaks = breaks_ != 0;
      if (breaks) --breaks_;
      if (breaks && landed_ == 0) return StatusCode::kTransport;
      if (breaks) --landed_;
      RailEvent event;
      event.kind = RailEventKind::kMessage;
      event.connection = item.connection;
      if (delivered_.size() < kMostKept) delivered_.push_back(item.copy);
      other.push(event, item.copy);
      return breaks ? StatusCode::kTransport : StatusCode::kOk;
    }
    if (request.remote != nullptr) {
      const auto found = other.regions_.find(item.region);
      if (found == other.regions_.end() || found->second.generation != item.generation) return StatusCode::kStaleKey;
      const LoopbackRegion& region = found->second;
      const bool reads = request.kind == WorkKind::kRead;
      if ((region.access & (reads ? kAccessRemoteRead : kAccessRemoteWrite)) == 0) return StatusCode::kAccessDenied;
      if (request.remote_offset > region.length || request.length > region.length - request.remote_offset)
        return StatusCode::kAccessDenied;
      uint8_t* there = region.base + request.remote_offset;
      const void* here = item.copied ? item.copy.data() : request.address;
      if (request.length > 0 && reads) std::memcpy(const_cast<void*>(request.address), there, request.length);
      if (request.length > 0 && !reads) std::memmove(there, here, request.length);
    }
    if (request.has_imm) {
      RailEvent event;
      event.kind = RailEventKind::kImmediate;
      event.imm = request.imm;
      event.connection = item.connection;
      other.push(event);
    }
    return {};
  }

  LoopbackHub& hub_;
  Capabilities capabilities_;
  RailInfo info_;
  uint64_t number_ = 0;
  std::string moved_;
  uint64_t next_region_ = 1;
  std::map<uint64_t, LoopbackRegion> regions_;
  std::vector<LoopbackPeer*> peers_;
  std::set<uint64_t> shut_out_;
  std::deque<Item> queue_;
  std::deque<Queued> events_;
  std::deque<std::string> messages_;  // handed out by the last poll
  std::mt19937_64 random_;
  uint64_t depth_ = 0;
  uint64_t burst_ = 0;
  uint64_t posted_ = 0;
  int fd_ = -1;
  bool early_ = false;
  bool flushes_ = true;
  bool takes_ = true;
  std::string why_;
  int shown_dmabuf_ = -1;
  static constexpr size_t kMostKept = 256;
  std::vector<std::string> delivered_;
  size_t breaks_ = 0;
  size_t landed_ = 0;
  bool held_ = false;
  bool deaf_ = false;
  bool armed_ = false;
};

inline bool LoopbackPeer::lost() const {
  const std::lock_guard<std::mutex> guard(LoopbackHub::shared().lock);
  return gone;
}

inline LoopbackPeer::~LoopbackPeer() {
  LoopbackHub& hub = LoopbackHub::shared();
  const std::lock_guard<std::mutex> guard(hub.lock);
  const auto found = hub.rails.find(owner);
  if (found != hub.rails.end()) std::erase(found->second->peers_, this);
}

inline Status open_loopback_rail(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail) {
  if (!spec.provider.empty() && spec.provider != "loopback") {
    *detail = "this is the loopback rail, not '" + spec.provider + "'";
    return StatusCode::kNoProvider;
  }
  if (LoopbackRail::option(spec, "opens", 1) == 0) {
    *detail = "it is broken";
    return StatusCode::kNoProvider;
  }
  *out = std::make_unique<LoopbackRail>(spec);
  return {};
}

}  // namespace asyncfabric::testing
