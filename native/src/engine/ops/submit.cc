// submit.cc: the data calls. Any thread: checks everything, pins what the op touches, pushes it into the mailbox. Lock-free.
#include <algorithm>
#include <cstring>

#include "engine/native_engine.h"

namespace asyncfabric {

namespace {

bool inside(uint64_t offset, uint64_t length, uint64_t bound) { return offset <= bound && length <= bound - offset; }

class WordMark final : public StreamMark {
 public:
  WordMark(WatchTable& watches, WatchId watch, uint64_t value) : watches_(watches), watch_(watch), value_(value) {}
  Status passed() override { return watches_.at_least(watch_, value_); }

 private:
  WatchTable& watches_;
  WatchId watch_;
  uint64_t value_;
};

}  // namespace

Status NativeEngine::take_op(OpKind kind, uint64_t cookie, int64_t imm, Op** out) {
  if (core_.closing.load(std::memory_order_acquire)) return StatusCode::kClosed;
  if (imm < kNoImm || imm > kMaxImm) return StatusCode::kInvalidArgument;
  if (!core_.has_room()) return StatusCode::kBusy;
  Op* op = core_.ops.take();
  if (op == nullptr) return StatusCode::kBusy;
  op->kind = kind;
  op->cookie = cookie;
  op->imm = imm;
  op->bytes_posted.store(0, std::memory_order_relaxed);
  op->bytes_done.store(0, std::memory_order_relaxed);
  op->peer_seen.store(0, std::memory_order_relaxed);
  *out = op;
  return {};
}

// Undoes take_op after a refusal. The generation stays: the handle was never handed out.
void NativeEngine::give_back(Op& op) {
  if (op.region != nullptr) core_.unpin_region(op.region);
  for (Target& target : op.targets)
    if (target.key != nullptr) core_.unpin_key(target.key);
  op.region = nullptr;
  op.targets.clear();
  op.pages.clear();
  op.boxes.clear();
  op.payload.clear();
  op.mark.reset();
  core_.ops.give_back(&op);
}

Status NativeEngine::use_region(Op& op, RegionId region, uint64_t offset, uint64_t length) {
  op.region = core_.regions.pin(region);
  if (op.region == nullptr) return StatusCode::kClosed;
  return inside(offset, length, op.region->value.length) ? StatusCode::kOk : StatusCode::kOutOfBounds;
}

Status NativeEngine::use_key(Op& op, KeyId key, uint64_t offset, uint64_t length, uint32_t right, Target* target) {
  target->key = core_.keys.pin(key);
  op.targets.push_back(*target);
  if (target->key == nullptr) return StatusCode::kStaleKey;
  const RemoteKey& remote = target->key->value;
  if ((remote.access & right) == 0) return StatusCode::kAccessDenied;
  return inside(offset, length, remote.length) ? StatusCode::kOk : StatusCode::kOutOfBounds;
}

void NativeEngine::send(Op& op, uint64_t bytes, OpId* id) {
  op.bytes_total.store(bytes, std::memory_order_relaxed);
  op.started_ns = now_ns();
  *id = op.id();
  core_.submitted.fetch_add(1, std::memory_order_relaxed);
  core_.mailbox.push(&op);
  wake_worker(bytes);
}

// A small op on rails that move data inside post() is posted right here when the worker sleeps: a wake-up costs more than the op.
void NativeEngine::wake_worker(uint64_t bytes) {
  if (core_.config.polling == PollingMode::kManual || !core_.gate.sleeping()) return;
  if (core_.moves_at_once() && bytes <= core_.config.inline_bytes) {
    EngineLock::Caller caller(core_.engine_lock);
    if (caller.try_lock()) {
      core_.step();
      core_.tallies.inline_steps.add(1);
      const bool settled = core_.settled();
      caller.unlock();
      if (settled) return;
    }
  }
  // The worker naps since this program polls: its next look brings the op on, or the end of the nap does.
  if (core_.poll_turn.napping() && core_.poll_turn.held(now_ns)) return;
  core_.gate.notify();
}

// A write or a read: one range here, one range there.
Status NativeEngine::submit_range(OpKind kind, uint64_t cookie, RegionId region, KeyId key, Target target, int64_t imm,
                                  OpId* id, MarkId after) {
  Op* op = nullptr;
  Status status = take_op(kind, cookie, imm, &op);
  if (!status.ok()) return status;
  op->mark = take_mark(after);
  const uint32_t right = kind == OpKind::kRead ? kAccessRemoteRead : kAccessRemoteWrite;
  status = use_region(*op, region, target.source_offset, target.length);
  if (status.ok()) status = use_key(*op, key, target.target_offset, target.length, right, &target);
  if (status.ok()) {
    send(*op, target.length, id);
  } else {
    give_back(*op);
  }
  return status;
}

// A mark that was named before means nothing more: it was passed, or its op is not this one.
std::unique_ptr<StreamMark> NativeEngine::take_mark(MarkId after) {
  if (after == 0) return nullptr;
  const std::lock_guard lock(core_.marks_mutex);
  auto found = core_.marks.extract(after);
  return found.empty() ? nullptr : std::move(found.mapped());
}

uint32_t NativeEngine::rail_of_device(int32_t device) const {
  for (uint32_t rail = 0; rail < core_.rails.size(); ++rail) {
    Rail& at = *core_.rails[rail]->rail;
    if (at.gpu() != nullptr && at.info().device == "cuda:" + std::to_string(device)) return rail;
  }
  return static_cast<uint32_t>(core_.rails.size());
}

Status NativeEngine::mark_stream(void* stream, int32_t device, MarkId* out) {
  const uint32_t rail = rail_of_device(device);
  if (rail == core_.rails.size()) return StatusCode::kUnsupported;
  std::unique_ptr<StreamMark> mark;
  if (const Status status = core_.rails[rail]->rail->gpu()->mark_stream(stream, &mark); !status.ok()) return status;
  *out = keep_mark(std::move(mark));
  return {};
}

Status NativeEngine::mark_word(WatchId watch, uint64_t value, MarkId* out) {
  if (core_.watches.at_least(watch, value).code == StatusCode::kClosed) return StatusCode::kClosed;
  *out = keep_mark(std::make_unique<WordMark>(core_.watches, watch, value));
  return {};
}

void NativeEngine::drop_mark(MarkId mark) { (void)take_mark(mark); }

MarkId NativeEngine::keep_mark(std::unique_ptr<StreamMark> mark) {
  const std::lock_guard lock(core_.marks_mutex);
  const MarkId id = core_.next_mark++;
  core_.marks.emplace(id, std::move(mark));
  return id;
}

Status NativeEngine::submit_write(uint64_t cookie, RegionId region, uint64_t offset, uint64_t length, KeyId key,
                                  uint64_t target_offset, int64_t imm, OpId* id, MarkId after) {
  return submit_range(OpKind::kWrite, cookie, region, key,
                      {.source_offset = offset, .target_offset = target_offset, .length = length}, imm, id, after);
}

Status NativeEngine::submit_read(uint64_t cookie, RegionId region, uint64_t offset, uint64_t length, KeyId key,
                                 uint64_t target_offset, OpId* id) {
  return submit_range(OpKind::kRead, cookie, region, key,
                      {.source_offset = offset, .target_offset = target_offset, .length = length}, kNoImm, id);
}

Status NativeEngine::submit_write_pages(uint64_t cookie, RegionId region, KeyId key, const PageBatch& batch,
                                        int64_t imm, OpId* id, MarkId after) {
  return submit_pages(OpKind::kWritePages, cookie, region, key, batch, imm, id, after);
}

Status NativeEngine::submit_read_pages(uint64_t cookie, RegionId region, KeyId key, const PageBatch& batch, OpId* id) {
  return submit_pages(OpKind::kReadPages, cookie, region, key, batch, kNoImm, id, 0);
}

Status NativeEngine::submit_pages(OpKind kind, uint64_t cookie, RegionId region, KeyId key, const PageBatch& batch,
                                  int64_t imm, OpId* id, MarkId after) {
  Op* op = nullptr;
  Status status = take_op(kind, cookie, imm, &op);
  if (!status.ok()) return status;
  op->mark = take_mark(after);
  const bool reads = kind == OpKind::kReadPages;
  Target target;
  status = use_region(*op, region, reads ? batch.target_offset : batch.source_offset, 0);
  if (status.ok())
    status = use_key(*op, key, reads ? batch.source_offset : batch.target_offset, 0,
                     reads ? kAccessRemoteRead : kAccessRemoteWrite, &target);
  if (status.ok() && batch.count != 0) {
    const uint64_t here = op->region->value.length, there = target.key->value.length;
    const uint64_t source_room = (reads ? there : here) - batch.source_offset;
    const uint64_t target_room = (reads ? here : there) - batch.target_offset;
    if (batch.page_bytes == 0) {
      status = StatusCode::kInvalidArgument;
    } else if (batch.page_bytes > source_room || batch.page_bytes > target_room) {
      status = StatusCode::kOutOfBounds;
    } else {
      // The largest page number that still fits.
      const auto last_page = [&](uint64_t room, uint64_t stride) {
        return stride == 0 ? ~0ull >> 1 : (room - batch.page_bytes) / stride;
      };
      op->pages.make(batch.count, core_.page_room);
      const bool fits = op->pages.fill(
          batch.source_pages, batch.target_pages, {batch.source_offset, batch.target_offset},
          {batch.source_stride, batch.target_stride},
          {last_page(source_room, batch.source_stride), last_page(target_room, batch.target_stride)}, reads);
      if (!fits) status = StatusCode::kOutOfBounds;
    }
  }
  if (status.ok()) {
    op->page_bytes = batch.page_bytes;
    op->targets[0].length = batch.count * batch.page_bytes;
    send(*op, op->targets[0].length, id);
  } else {
    give_back(*op);
  }
  return status;
}

Status NativeEngine::submit_write_boxes(uint64_t cookie, RegionId region, KeyId key, const BoxBatch& batch, int64_t imm,
                                        OpId* id) {
  // Copied one behind the other, so only where all of it goes over one rail. A peer that another rail reaches gets none: see Core::plan.
  const auto gathers = [](const auto& rail) { return rail->capabilities.gathers; };
  if (std::count_if(core_.rails.begin(), core_.rails.end(), gathers) != 1) return StatusCode::kUnsupported;
  Op* op = nullptr;
  Status status = take_op(OpKind::kBoxes, cookie, imm, &op);
  if (!status.ok()) return status;
  Target target;
  status = use_region(*op, region, 0, 0);
  if (status.ok()) status = use_key(*op, key, 0, 0, kAccessRemoteWrite, &target);
  if (status.ok()) {
    const RegionEntry& source = op->region->value;
    status = op->boxes.fill(batch, source.base, source.length, op->targets[0].key->value.length);
  }
  if (status.ok()) {
    op->targets[0].length = op->boxes.all_bytes();
    send(*op, op->boxes.all_bytes(), id);
  } else {
    give_back(*op);
  }
  return status;
}

Status NativeEngine::submit_scatter(uint64_t cookie, RegionId region, const ScatterTarget* targets, size_t count,
                                    int64_t imm, OpId* id) {
  Op* op = nullptr;
  Status status = take_op(OpKind::kScatter, cookie, imm, &op);
  if (!status.ok()) return status;
  status = use_region(*op, region, 0, 0);
  uint64_t bytes = 0;
  for (size_t i = 0; i < count && status.ok(); ++i) {
    const ScatterTarget& to = targets[i];
    Target target{.source_offset = to.source_offset, .target_offset = to.target_offset, .length = to.length};
    if (!inside(to.source_offset, to.length, op->region->value.length))
      status = StatusCode::kOutOfBounds;
    else
      status = use_key(*op, to.key, to.target_offset, to.length, kAccessRemoteWrite, &target);
    bytes += to.length;
  }
  if (status.ok())
    send(*op, bytes, id);
  else
    give_back(*op);
  return status;
}

Status NativeEngine::submit_signal(uint64_t cookie, const PeerId* peers, size_t count, int64_t imm, OpId* id) {
  if (imm == kNoImm) return StatusCode::kInvalidArgument;
  Op* op = nullptr;
  const Status status = take_op(OpKind::kSignal, cookie, imm, &op);
  if (!status.ok()) return status;
  for (size_t i = 0; i < count; ++i) op->targets.push_back({.peer_id = peers[i]});
  send(*op, 0, id);
  return {};
}

Status NativeEngine::submit_send(uint64_t cookie, PeerId peer, const void* payload, size_t length, OpId* id) {
  if (length > kMaxMessageBytes) return StatusCode::kOutOfBounds;
  Op* op = nullptr;
  const Status status = take_op(OpKind::kSend, cookie, kNoImm, &op);
  if (!status.ok()) return status;
  op->targets.push_back({.peer_id = peer});
  op->payload.resize(kUserHeadBytes + length);
  const auto length16 = static_cast<uint16_t>(length);
  std::memcpy(op->payload.data() + kHeaderBytes, &length16, sizeof length16);
  if (length != 0) std::memcpy(op->payload.data() + kUserHeadBytes, payload, length);
  send(*op, length, id);
  return {};
}

Status NativeEngine::cancel(OpId id) {
  const uint32_t slot = static_cast<uint32_t>(id) - 1;
  if (!core_.ops.exists(slot)) return StatusCode::kInvalidArgument;
  Op& op = core_.ops[slot];
  const uint32_t generation = static_cast<uint32_t>(id >> 32);
  if (op.generation.load(std::memory_order_acquire) != generation) return {};  // it ended already
  op.mean_to_cancel(generation);
  // Queued already: the worker clears the flag before it reads the generation, so it will see ours.
  if (op.cancel_queued.exchange(1, std::memory_order_seq_cst) == 0) core_.cancels.push(&op.cancel_link);
  if (core_.config.polling != PollingMode::kManual) core_.gate.notify();
  return {};
}

Status NativeEngine::arm_writable(uint64_t cookie) {
  if (core_.closing.load(std::memory_order_acquire)) return StatusCode::kClosed;
  {
    const std::lock_guard lock(core_.writable_mutex);
    core_.writable_cookies.push_back(cookie);
    core_.writable_wanted.store(true, std::memory_order_release);
  }
  const Moment moment(core_);
  core_.notify_writable();  // there may be room already
  return {};
}

OpProgress NativeEngine::progress(OpId id) const {
  OpProgress progress;
  const uint32_t slot = static_cast<uint32_t>(id) - 1;
  if (!core_.ops.exists(slot)) return progress;
  const Op& op = core_.ops[slot];
  if (op.generation.load(std::memory_order_acquire) != static_cast<uint32_t>(id >> 32)) return progress;
  progress.known = true;
  progress.bytes_total = op.bytes_total.load(std::memory_order_relaxed);
  progress.bytes_posted = op.bytes_posted.load(std::memory_order_relaxed);
  progress.bytes_done = op.bytes_done.load(std::memory_order_relaxed);
  progress.outstanding = op.outstanding.load(std::memory_order_relaxed);
  progress.peer = op.peer_seen.load(std::memory_order_relaxed);
  return progress;
}

}  // namespace asyncfabric
