// engine.cc: opening and ending an engine, counters, watch words, completions and statistics.
#include <cerrno>

#include "base/descriptor_room.h"
#include "engine/native_engine.h"
#include "provider/catalog.h"

namespace asyncfabric {

Core::Core(const EngineConfig& engine_config)
    : config(engine_config),
      incarnation(random_incarnation()),
      host(host_identity()),
      ops(engine_config.max_ops),
      ring(4ull * engine_config.max_ops + 64) {
  counters.before_flags([this] { return flush_nic_writes().ok(); });
}

Core::~Core() {
  // What the transports may still touch goes last: first attachments and peers, then our registrations, then the rails, which flush.
  control.stop();
  keys.for_each([](KeyTable::Slot& slot) { slot.value.lanes.clear(); });
  for (const auto& peer : peers) {
    peer->graveyard.clear();
    for (const Lane& lane : peer->lanes)
      if (lane.handle && !lane.closed) rails[lane.rail]->rail->disconnect(*lane.handle);
    peer->lanes.clear();
  }
  admission.refusals.clear();
  regions.for_each([this, until = now_ns() + config.drain_deadline_ns](RegionTable::Slot& slot) {
    for (uint32_t rail = 0; rail < slot.value.memory.size(); ++rail)
      if (slot.value.memory[rail])
        rails[rail]->rail->release_memory(slot.value.memory[rail], until - std::min(until, now_ns()));
    slot.value.memory.clear();
  });
  rails.clear();
}

std::string Core::address() const {
  const std::lock_guard lock(address_mutex);
  return own_address;
}

Status Core::note_address() {
  AddressBlob blob;
  blob.incarnation = incarnation;
  blob.host = host;
  for (const auto& rail : rails) blob.rails.push_back({rail->protocol, rail->rail->address()});
  std::string made = encode_address(blob);
  if (made.size() > kMaxAddressBytes) return StatusCode::kInvalidArgument;
  const std::lock_guard lock(address_mutex);
  own_address = std::move(made);
  return {};
}

Status Engine::open(const EngineConfig& config, std::unique_ptr<Engine>* out, std::string* detail) {
  if (config.rails.empty() || config.rails.size() > 32 || config.max_ops == 0 || config.max_ops > 1u << 20) {
    *detail = "an engine needs 1 to 32 rails and 1 to 1048576 ops";
    return StatusCode::kInvalidArgument;
  }
  if (!config.secret.empty() &&
      (config.secret.size() < secret::kLeastSecretBytes || config.secret.size() > secret::kMostSecretBytes)) {
    *detail = "a secret has 16 to 4096 bytes";
    return StatusCode::kInvalidArgument;
  }
  make_descriptor_room();
  auto engine = std::make_unique<NativeEngine>(config);
  const Status status = engine->start(detail);
  if (status.ok()) *out = std::move(engine);
  return status;
}

Status Engine::check_address(std::string_view bytes, uint64_t* incarnation) {
  AddressBlob blob;
  if (!decode_address(bytes, &blob)) return StatusCode::kInvalidArgument;
  *incarnation = blob.incarnation;
  return {};
}

Status NativeEngine::open_state(const RailSpec& spec, RailState* state, std::string* detail) const {
  if (const Status status = open_rail(spec, &state->rail, detail); !status.ok()) return status;
  if (GpuRail* gpu = state->rail->gpu(); gpu != nullptr)
    if (const Status status = gpu->share_words(core_.words.base(), core_.words.bytes()); !status.ok()) {
      *detail = spec.provider + ": the words that kernels wait for could not be pinned";
      return status;
    }
  if (core_.has_secret())
    if (const Status status = state->rail->require_admission(); !status.ok()) {
      *detail = spec.provider + ": this rail cannot know peers that proved the secret from others";
      return status;
    }
  state->capabilities = state->rail->capabilities();
  const size_t plus = spec.provider.rfind('+');
  state->protocol = plus == std::string::npos ? spec.provider : spec.provider.substr(plus + 1);
  state->reason = spec.reason;
  const double speed = state->rail->info().gbits_per_s;
  state->weight = speed > 0 ? speed : 1;
  return {};
}

Status NativeEngine::start(std::string* detail) {
  if (core_.gate.fd() < 0 || core_.loop_gate.fd() < 0) {
    *detail = "there is no event descriptor";
    return {StatusCode::kNoMemory, descriptors_ran_out() ? EMFILE : 0};
  }
  Status refused;
  for (const RailSpec& spec : core_.config.rails) {
    auto state = std::make_unique<RailState>();
    detail->clear();
    if (const Status status = open_state(spec, state.get(), detail); !status.ok()) {
      if (!spec.optional) return status;
      core_.left_out.push_back({spec.device.empty() ? spec.provider : spec.provider + ":" + spec.device, *detail});
      refused = status;
      continue;
    }
    core_.any_synchronous = core_.any_synchronous || state->capabilities.synchronous;
    core_.rails.push_back(std::move(state));
  }
  if (core_.rails.empty()) {
    *detail = "none of the rails that were chosen could be opened";
    for (const LeftOutRail& rail : core_.left_out) *detail += "; " + rail.rail + ": " + rail.reason;
    return refused;
  }
  const auto takes_lists = [](const auto& rail) { return rail->capabilities.list_pages != 0; };
  // What a rail could not pin it reads with the processor.
  if (std::any_of(core_.rails.begin(), core_.rails.end(), takes_lists) && core_.page_room.open())
    for (const auto& rail : core_.rails)
      if (GpuRail* gpu = rail->rail->gpu(); gpu != nullptr)
        (void)gpu->share_words(core_.page_room.base(), PageRoom::kBytes);
  if (!core_.note_address().ok()) {
    *detail = "the address of " + std::to_string(core_.rails.size()) + " rails is longer than " +
              std::to_string(kMaxAddressBytes) + " bytes";
    return StatusCode::kInvalidArgument;
  }
  std::vector<int> fds;
  core_.can_hand_over = core_.config.polling == PollingMode::kAdaptive && core_.any_synchronous;
  for (const auto& rail : core_.rails) {
    const int fd = rail->rail->wait_fd();
    if (fd >= 0) fds.push_back(fd);
    core_.can_hand_over = core_.can_hand_over && fd >= 0;
  }
  if (const Status status = core_.rail_watch.open(core_.gate.fd(), core_.loop_gate.fd(), fds, core_.can_hand_over);
      !status.ok()) {
    *detail = "the descriptors of the rails cannot be watched";
    return status;
  }
  if (const Status status = core_.control.start(detail); !status.ok()) return status;
  if (core_.config.polling != PollingMode::kManual)
    if (const Status status = worker_.start(detail); !status.ok()) return status;
  return {};
}

NativeEngine::~NativeEngine() {
  core_.closing.store(true, std::memory_order_release);
  core_.control.stop();
  worker_.stop();
}

std::vector<RailInfo> NativeEngine::rails() const {
  std::vector<RailInfo> infos;
  for (const auto& rail : core_.rails) {
    infos.push_back(rail->rail->info());
    infos.back().up = rail->up.load(std::memory_order_relaxed);
    infos.back().can_gather = rail->capabilities.gathers;
    infos.back().reason = rail->reason;
    infos.back().admission = core_.has_secret() ? "secret" : "open";
  }
  return infos;
}

std::vector<PeerInfo> NativeEngine::peers() const {
  EngineLock::Caller caller(core_.engine_lock);
  const std::lock_guard lock(caller);
  std::vector<PeerInfo> infos;
  for (const Peer* peer : core_.peers.all()) {
    PeerInfo info;
    info.id = peer->id;
    info.incarnation = peer->incarnation;
    info.state = static_cast<uint32_t>(peer->state);
    info.lanes = static_cast<uint32_t>(peer->lanes.size());
    info.provider = peer->protocol;
    info.bytes_sent = peer->bytes_sent.load(std::memory_order_relaxed);
    info.ops_in_flight = peer->ops_in_flight.load(std::memory_order_relaxed);
    infos.push_back(std::move(info));
  }
  return infos;
}

EngineStatistics NativeEngine::statistics() const {
  const Tallies& tallies = core_.tallies;
  EngineStatistics now;
  EngineLock::Caller caller(core_.engine_lock);  // between two passes, so that the numbers fit each other
  const std::lock_guard lock(caller);
  now.ops_submitted = core_.submitted.load(std::memory_order_relaxed);
  now.ops_completed = tallies.ops_completed.get();
  now.ops_failed = tallies.ops_failed.get();
  now.ops_cancelled = tallies.ops_cancelled.get();
  now.bytes_written = tallies.bytes_written.get();
  now.bytes_read = tallies.bytes_read.get();
  now.work_requests = tallies.work_requests.get();
  now.immediates_sent = tallies.immediates_sent.get();
  now.immediates_received = tallies.immediates_received.get();
  now.stale_arrivals = tallies.stale_arrivals.get();
  now.early_arrivals = tallies.early_arrivals.get();
  now.messages_received = tallies.messages_received.get();
  now.messages_refused = tallies.messages_refused.get();
  now.steps = tallies.steps.get();
  now.sleeps = tallies.sleeps.get();
  now.loop_wakes = tallies.loop_wakes.get();
  now.inline_steps = tallies.inline_steps.get();
  now.regions = regions_.load(std::memory_order_relaxed);
  now.registered_bytes = registered_bytes_.load(std::memory_order_relaxed);
  now.quarantined_regions = tallies.quarantined.get();
  now.peers = core_.peers.known();
  now.unconfirmed_closes = core_.unconfirmed.size();
  return now;
}

Status NativeEngine::open_counter(int64_t imm, CounterId* out, uint32_t* imm_out) {
  if (core_.closing.load(std::memory_order_acquire)) return StatusCode::kClosed;
  const Status status = core_.counters.open(imm, out, imm_out);
  if (status.code != StatusCode::kUnconfirmed) return status;
  const Moment moment(core_);
  core_.report_closings();  // where nobody has to be asked, that is all
  return core_.counters.open(imm, out, imm_out);
}

void NativeEngine::close_counter(CounterId counter) {
  core_.counters.close(counter);
  wake_worker(0);
}

Status NativeEngine::arm_closed(uint64_t cookie, uint32_t imm) {
  if (core_.closing.load(std::memory_order_acquire)) return StatusCode::kClosed;
  if (imm > kMaxImm) return StatusCode::kInvalidArgument;
  const Moment moment(core_);
  core_.report_closings();
  if (const auto found = core_.unconfirmed.find(imm); found != core_.unconfirmed.end())
    found->second.cookies.push_back(cookie);
  else
    core_.publish({.cookie = cookie, .kind = CompletionKind::kControl, .value = imm});
  return {};
}

std::vector<ClosingInfo> NativeEngine::closings(int64_t imm) const {
  constexpr size_t kMost = 64;
  std::vector<ClosingInfo> found;
  EngineLock::Caller caller(core_.engine_lock);
  const std::lock_guard lock(caller);
  for (const auto& [closed, waits] : core_.unconfirmed) {
    if (imm != kNoImm && closed != imm) continue;
    found.push_back({closed, now_ns() - waits.since_ns, {}});
    if (found.size() == kMost) break;
  }
  for (const auto& peer : core_.peers)
    peer->closings_asked.for_each([&](uint32_t closing) {
      for (ClosingInfo& info : found)
        if (info.imm == closed_imm(closing)) info.peers.push_back(peer->id);
    });
  return found;
}

Status NativeEngine::arm_counter(CounterId counter, uint64_t cookie, uint64_t target) {
  if (!core_.counters.is_open(counter)) return StatusCode::kClosed;
  if (!core_.counters.arm(counter, cookie, target)) return {};
  // Reached already: only the lock's holder may publish, so it looks again.
  Op* op = core_.ops.take();
  if (op == nullptr) {
    const Moment moment(core_);
    const CounterArrival arrival = core_.counters.check_armed(static_cast<uint32_t>(counter) - 1);
    if (arrival.reached)
      core_.publish({.cookie = arrival.cookie, .kind = CompletionKind::kCounter, .value = arrival.value});
    return {};
  }
  op->kind = OpKind::kCounterCheck;
  op->imm = static_cast<int64_t>(static_cast<uint32_t>(counter) - 1);
  core_.mailbox.push(op);
  wake_worker(0);
  return {};
}

// Runs the engine until reached(), unless it is not open() any more: what comes is seen by the thread that waits for it, and no second
// thread spins.
template <class Reached, class Open>
Status NativeEngine::spin(uint64_t deadline_ns, Reached reached, Open open) {
  if (reached()) return {};  // seen by the worker: it goes on, and no system call is needed
  Status status;
  {
    EngineLock::Caller caller(core_.engine_lock);
    bool awake = false;
    for (uint32_t turn = 0; !reached(); ++turn) {
      if ((turn & 63) == 0) {
        if (!open() || core_.closing.load(std::memory_order_relaxed)) {
          status = StatusCode::kClosed;
          break;
        }
        if (now_ns() >= deadline_ns) {
          status = StatusCode::kTimeout;
          break;
        }
      }
      if (caller.try_lock()) {
        if (!awake)
          for (const auto& rail : core_.rails) rail->rail->cancel_wait();  // peers need not ring while we look
        awake = true;
        core_.step();
        caller.unlock();
      }
      cpu_pause();
    }
  }
  core_.gate.notify();
  return status;
}

Status NativeEngine::spin_counter(CounterId counter, uint64_t target, uint64_t deadline_ns, uint64_t* value) {
  if (!core_.counters.is_open(counter)) return StatusCode::kClosed;
  const auto reached = [&] { return (*value = core_.counters.value(counter)) >= target; };
  return spin(deadline_ns, reached, [&] { return core_.counters.is_open(counter); });
}

void NativeEngine::take_messages(size_t capacity, std::vector<ReceivedMessage>* out) {
  if (core_.inbox.take(capacity, out)) wake_worker(0);
}

Status NativeEngine::spin_messages(size_t capacity, uint64_t deadline_ns, std::vector<ReceivedMessage>* out) {
  bool due = false;
  const auto reached = [&] {
    if (!core_.inbox.empty()) due = core_.inbox.take(capacity, out);
    return !out->empty();
  };
  const Status status = spin(deadline_ns, reached, [] { return true; });
  if (due) wake_worker(0);
  return status;
}

Status NativeEngine::counter_flag(CounterId counter, uint64_t** word) {
  if (!core_.counters.is_open(counter)) return StatusCode::kClosed;
  if (const Status status = core_.flush_nic_writes(); !status.ok()) return status;  // a flag that nobody could raise
  *word = core_.counters.flag(counter, core_.words);
  return *word != nullptr ? StatusCode::kOk : StatusCode::kBusy;
}

Status NativeEngine::stream_wait(CounterId counter, void* stream, int32_t device, uint64_t target) {
  uint64_t* word = nullptr;
  if (const Status status = counter_flag(counter, &word); !status.ok()) return status;
  const uint32_t rail = rail_of_device(device);
  if (rail == core_.rails.size()) return StatusCode::kUnsupported;
  return core_.rails[rail]->rail->gpu()->stream_wait(stream, word, target);
}

Status NativeEngine::arm_watch(WatchId watch, uint64_t cookie, uint64_t seen) {
  const Status status = core_.watches.arm(watch, cookie, seen);
  if (status.ok()) core_.gate.notify();
  return status;
}

size_t NativeEngine::poll(Completion* out, size_t capacity) {
  const size_t count = core_.ring.take(out, capacity);
  size_t ops = 0;
  for (size_t i = 0; i < count; ++i) ops += out[i].kind == CompletionKind::kOp ? 1 : 0;
  if (ops != 0) core_.consumed.fetch_add(ops, std::memory_order_relaxed);
  if (core_.backlogged.load(std::memory_order_seq_cst) || core_.writable_wanted.load(std::memory_order_acquire))
    core_.gate.notify();
  return count;
}

size_t NativeEngine::step() {
  const Moment moment(core_);
  return core_.step();
}

}  // namespace asyncfabric
