// fault_rail.cc: accepts, holds, reorders, loses and fails requests by plan; the rest is the inner rail's.
#include "providers/fault/fault_rail.h"

#include <algorithm>
#include <utility>

namespace asyncfabric {

FaultRail::FaultRail(const FaultPlan& plan, std::unique_ptr<Rail> inner)
    : plan_(plan), inner_(std::move(inner)), capabilities_(inner_->capabilities()), random_(plan.seed) {
  const bool holds = plan_.reorder != 0 || plan_.delay_us != 0;
  capabilities_.gathers = false;  // it keeps requests, and posts them in another order
  capabilities_.maps = false;     // what is stored directly has no faults
  if (plan_.reorder != 0) capabilities_.ordered = false;
  if (holds || plan_.hang != 0 || plan_.dead_peer_after != 0 || plan_.busy_every != 0)
    capabilities_.synchronous = false;
  // The inner rail sees its peer alive; only heartbeats can find out that this one swallows everything.
  if (plan_.dead_peer_after != 0) capabilities_.reports_peer_loss = false;
  // release_memory() then looks into limbo_, which post() fills.
  if (plan_.hang != 0 || plan_.dead_peer_after != 0) capabilities_.concurrent_control = false;
}

RailInfo FaultRail::info() const {
  RailInfo info = inner_->info();
  info.provider = "fault+" + info.provider;
  info.ordered = capabilities_.ordered;
  info.up = info.up && !down_;
  return info;
}

Status FaultRail::register_memory(const Memory& memory, std::unique_ptr<LocalMemory>* out, std::string* key) {
  if (++registrations_ == plan_.refuse_register) return StatusCode::kNoMemory;
  return inner_->register_memory(memory, out, key);
}

Status FaultRail::narrow_key(LocalMemory& memory, const KeyScope& scope, std::string* key) {
  return inner_->narrow_key(memory, scope, key);
}

Status FaultRail::revoke_memory(LocalMemory& memory, uint64_t deadline_ns, std::string* new_key) {
  return inner_->revoke_memory(memory, deadline_ns, new_key);
}

Status FaultRail::release_memory(std::unique_ptr<LocalMemory>& memory, uint64_t deadline_ns) {
  // A device that hangs and cannot be flushed may touch the memory at any time: it must stay pinned.
  if (plan_.flush == 0 && memory != nullptr)
    for (const WorkRequest& request : limbo_)
      if (request.local == memory.get()) return StatusCode::kDrainTimeout;
  return inner_->release_memory(memory, deadline_ns);
}

Status FaultRail::connect(std::string_view address, uint64_t deadline_ns, std::unique_ptr<RailPeer>* out) {
  return inner_->connect(address, deadline_ns, out);
}

Status FaultRail::attach(RailPeer& peer, std::string_view key, uint64_t patience_ns,
                         std::unique_ptr<RemoteMemory>* out) {
  return inner_->attach(peer, key, patience_ns, out);
}

Status FaultRail::disconnect(RailPeer& peer) {
  if (plan_.flush == 0) return StatusCode::kUnsupported;
  for (const Held& held : held_)
    if (held.request.peer == &peer) fail(held.request, StatusCode::kPeerDead);
  std::erase_if(held_, [&](const Held& held) { return held.request.peer == &peer; });
  for (const WorkRequest& request : limbo_)
    if (request.peer == &peer) fail(request, StatusCode::kPeerDead);
  std::erase_if(limbo_, [&](const WorkRequest& request) { return request.peer == &peer; });
  return inner_->disconnect(peer);
}

PostResult FaultRail::post(std::span<const WorkRequest> requests) {
  PostResult result;
  for (const WorkRequest& request : requests) {
    result.status = request.kind == WorkKind::kSend ? post_message(request) : accept(request);
    if (!result.status.ok()) return result;
    ++result.accepted;
  }
  return result;
}

Status FaultRail::post_message(const WorkRequest& request) {
  if (dead()) {
    limbo_.push_back(request);
    return {};
  }
  // Random, since every n-th could fall in step with a protocol that sends in pairs and lose the same one for ever.
  const bool lost = plan_.harm_messages != 0 && (messages_ == 0 || random_() % plan_.harm_messages == 0);
  if (!lost) {
    const PostResult posted = inner_->post({&request, 1});
    if (posted.accepted == 0) {
      message_turns_ = kMessageTurns;
      return posted.status;
    }
    message_turns_ = 0;
  } else if (request.signalled) {
    fail(request, {});  // the sender of a lost datagram sees success
  }
  ++messages_;
  return {};
}

// Decides the fate of one request. Not ok: not taken, and not counted.
Status FaultRail::accept(const WorkRequest& request) {
  if (down_) return StatusCode::kRailDown;
  const uint64_t number = count_ + 1;
  if (plan_.busy_every != 0 && number % plan_.busy_every == 0 && refused_number_ != number) {
    refused_number_ = number;
    return StatusCode::kBusy;
  }
  if (dead() || hangs(number)) {
    limbo_.push_back(request);
  } else if (number == plan_.error_at || (plan_.error_every != 0 && number % plan_.error_every == 0)) {
    fail(request, StatusCode::kTransport);
  } else if (plan_.reorder != 0 || plan_.delay_us != 0) {
    held_.push_back({request, Clock::now() + std::chrono::microseconds(plan_.delay_us)});
  } else {
    const PostResult posted = inner_->post({&request, 1});
    if (posted.accepted == 0) return posted.status;
  }
  count_ = number;
  if (dead()) {
    for (const Held& held : held_) limbo_.push_back(held.request);
    held_.clear();
  }
  if (plan_.rail_down_at != 0 && number >= plan_.rail_down_at && !went_down_) go_down();
  return {};
}

void FaultRail::go_down() {
  down_ = went_down_ = true;
  up_at_ = Clock::now() + std::chrono::microseconds(plan_.rail_up_after_us);
  RailEvent event;
  event.kind = RailEventKind::kRailDown;
  event.status = StatusCode::kRailDown;
  own_events_.push_back(event);
  for (const Held& held : held_) fail(held.request, StatusCode::kRailDown);
  held_.clear();
}

void FaultRail::come_up_when_due() {
  if (!down_ || plan_.rail_up_after_us == 0 || Clock::now() < up_at_) return;
  down_ = false;
  RailEvent event;
  event.kind = RailEventKind::kRailUp;
  own_events_.push_back(event);
}

void FaultRail::fail(const WorkRequest& request, Status status) {
  RailEvent event;
  event.kind = RailEventKind::kDone;
  event.tag = request.tag;
  event.status = status;
  own_events_.push_back(event);
}

// Without reorder the queue leaves in posted order. With it, each poll lets a random number of due requests go, at least one,
// and so many that no more than the window stays.
void FaultRail::release_due() {
  if (held_.empty()) return;
  if (message_turns_ > 0) {
    --message_turns_;
    return;
  }
  const auto now = Clock::now();
  if (plan_.reorder == 0) {
    while (!held_.empty() && held_.front().due <= now && release_one(0)) continue;
    return;
  }
  const auto later =
      std::partition_point(held_.begin(), held_.end(), [&](const Held& held) { return held.due <= now; });
  size_t due = static_cast<size_t>(later - held_.begin());
  if (due == 0) return;
  size_t releases = std::uniform_int_distribution<size_t>(1, due)(random_);
  if (due > plan_.reorder) releases = std::max(releases, due - plan_.reorder);
  for (; releases > 0; --releases, --due)
    if (!release_one(std::uniform_int_distribution<size_t>(0, due - 1)(random_))) return;
}

// False: the inner rail is busy and the request stays.
bool FaultRail::release_one(size_t index) {
  const auto position = held_.begin() + static_cast<std::ptrdiff_t>(index);
  const PostResult posted = inner_->post({&position->request, 1});
  if (posted.accepted == 0 && posted.status.code == StatusCode::kBusy) return false;
  if (posted.accepted == 0) fail(position->request, posted.status);
  held_.erase(position);
  return true;
}

size_t FaultRail::poll(std::span<RailEvent> events) {
  come_up_when_due();
  release_due();
  size_t count = 0;
  for (; count < events.size() && !own_events_.empty(); ++count) {
    events[count] = own_events_.front();
    own_events_.pop_front();
  }
  return count + take_inner(events.subspan(count));
}

size_t FaultRail::take_inner(std::span<RailEvent> events) {
  if (plan_.slow_reader_us != 0 && !events.empty()) {
    if (Clock::now() < next_read_) return 0;
    events = events.first(1);
  }
  if (!dead()) {
    const size_t taken = events.empty() ? 0 : inner_->poll(events);
    if (taken > 0) next_read_ = Clock::now() + std::chrono::microseconds(plan_.slow_reader_us);
    return taken;
  }
  size_t kept = 0;
  while (kept == 0 && !events.empty()) {  // what a dead peer sent is dropped, so look on until something counts
    const size_t taken = inner_->poll(events);
    for (size_t i = 0; i < taken; ++i) {
      const RailEventKind kind = events[i].kind;
      if (kind != RailEventKind::kImmediate && kind != RailEventKind::kMessage) events[kept++] = events[i];
    }
    if (taken == 0 || plan_.slow_reader_us != 0) break;
  }
  return kept;
}

bool FaultRail::prepare_wait() {
  if (!held_.empty() || !own_events_.empty() || (down_ && plan_.rail_up_after_us != 0)) return false;
  return inner_->prepare_wait();
}

// The provider's one entry, named by the catalog.
Status open_fault_rail(const RailSpec& spec, OpenRail inner, std::unique_ptr<Rail>* out, std::string* detail) {
  FaultPlan plan;
  RailSpec inner_spec;
  if (const Status status = parse_fault_spec(spec, &plan, &inner_spec, detail); !status.ok()) return status;
  if (plan.no_immediates != 0) {
    *detail = inner_spec.provider + " device '" + inner_spec.device +
              "' has no writes with immediate (iWARP is such a device): it cannot count arrivals and is refused";
    return StatusCode::kNoProvider;
  }
  std::unique_ptr<Rail> opened;
  if (const Status status = inner(inner_spec, &opened, detail); !status.ok()) {
    if (!inner_spec.options.empty()) *detail += "; options of a fault rail are " + fault_option_names();
    return status;
  }
  *out = std::make_unique<FaultRail>(plan, std::move(opened));
  return {};
}

}  // namespace asyncfabric
