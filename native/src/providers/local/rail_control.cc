// rail_control.cc: the control calls of a local rail: registering memory, connecting, attaching. See rail.h.
#include <sys/socket.h>
#include <sys/uio.h>
#include <cerrno>

#include "base/clock.h"
#include "base/descriptor_room.h"
#include "providers/local/peers/identity.h"
#include "providers/local/rail.h"

namespace asyncfabric::local {
namespace {

// The patience of the Rail contract is a duration; inside this folder deadlines are points in time.
constexpr uint64_t kAttemptNs = 2'000'000'000;  // after the last call that went on with it

class LocalHandle : public LocalMemory {
 public:
  LocalHandle(uint32_t slot) : slot(slot) {}
  const uint32_t slot;
};

}  // namespace

Status LocalRail::register_memory(const Memory& memory, std::unique_ptr<LocalMemory>* out, std::string* key) {
  if (memory.device != kHostDevice) return StatusCode::kUnsupported;
  return enter(memory, {}, out, key);
}

Status LocalRail::enter(const Memory& memory, std::vector<UniqueFd> files, std::unique_ptr<LocalMemory>* out,
                        std::string* key) {
  uint32_t slot = 0;
  const Status status = rooms_->regions.add(memory, std::move(files), &slot, key);
  if (status.ok()) *out = std::make_unique<LocalHandle>(slot);
  return status;
}

Status LocalRail::narrow_key(LocalMemory& memory, const KeyScope& scope, std::string* key) {
  return rooms_->regions.narrow(static_cast<LocalHandle&>(memory).slot, scope, key);
}

Status LocalRail::revoke_memory(LocalMemory& memory, uint64_t deadline_ns, std::string* new_key) {
  return rooms_->regions.revoke(
      static_cast<LocalHandle&>(memory).slot, from_now(deadline_ns), [this] { return rooms_->connections->census(); },
      new_key);
}

Status LocalRail::release_memory(std::unique_ptr<LocalMemory>& memory, uint64_t deadline_ns) {
  const Status status = rooms_->regions.remove(static_cast<LocalHandle&>(*memory).slot, from_now(deadline_ns),
                                               [this] { return rooms_->connections->census(); });
  if (status.ok()) memory.reset();
  return status;
}

Status LocalRail::connect(std::string_view address, uint64_t deadline_ns, std::unique_ptr<RailPeer>* out) {
  RailAddress target;
  if (const Status status = decode_address(address, &target); !status.ok()) return status;
  if (target.host != host_identity()) return StatusCode::kUnsupported;

  const uint64_t now = now_ns();
  std::erase_if(attempts_, [now](const auto& one) { return now > one.second.seen_ns + kAttemptNs; });
  const SegmentLayout layout(options_.ring_entries);
  Attempt& attempt = attempts_[std::string(address)];
  attempt.seen_ns = now;
  Status status;
  if (attempt.link == nullptr) status = begin(target, &attempt);
  if (status.ok()) status = shake_hands(target, from_now(deadline_ns), attempt);
  if (status.code == StatusCode::kBusy) return status;
  const std::shared_ptr<Outgoing> link = std::move(attempt.link);
  const std::shared_ptr<Mapping> segment = std::move(attempt.segment);
  attempts_.erase(std::string(address));
  if (!status.ok()) return status;
  segment->populate(layout.ring(), layout.staging() - layout.ring());
  link->foreign = choose_foreign_path(*link);

  auto handle = std::make_unique<PeerHandle>(link, [connections = rooms_->connections](Outgoing& closing) {
    connections->forget(closing.serial);
    closing.lost.store(true, std::memory_order_release);
    shutdown(closing.socket.get(), SHUT_RDWR);
  });
  rooms_->connections->enlist(link, handle.get());
  rooms_->service.watch(*link);  // after enlist: a hang-up must find whom it concerns
  if (link->process->gone()) rooms_->connections->lose(link->serial);  // its pidfd may have spoken before
  *out = std::move(handle);
  return {};
}

Status LocalRail::begin(const RailAddress& target, Attempt* attempt) {
  const SegmentLayout layout(options_.ring_entries);
  if (const Status status =
          Mapping::create(FileRole::kSegment, layout.total(), &attempt->segment, &attempt->segment_file);
      !status.ok())
    return status;
  make_descriptor_room(attempt->segment_file.get());
  auto* header = attempt->segment->as<SegmentHeader>();
  header->magic = kSegmentMagic;
  header->version = kLayoutVersion;
  header->entries = options_.ring_entries;
  attempt->link = std::make_shared<Outgoing>(attempt->segment, options_.ring_entries);
  attempt->link->serial = next_serial_++;
  const Status status = rooms_->service.neighbours().process(target.pid, target.process_start, &attempt->link->process);
  return status.code == StatusCode::kPeerDead ? Status(StatusCode::kPeerUnreachable, status.raw) : status;
}

// kBusy: it goes on with the next call.
Status LocalRail::shake_hands(const RailAddress& target, uint64_t deadline_ns, Attempt& attempt) {
  Outgoing& link = *attempt.link;
  if (!attempt.our_end)
    if (const Status status = greet(target, deadline_ns, attempt); !status.ok()) return status;
  WireMessage welcome;
  FdPack fds;
  const Status status = await_wire(link.socket.get(), WireKind::kWelcome, deadline_ns, &welcome, &fds);
  if (status.code == StatusCode::kTimeout) return {StatusCode::kBusy, status.raw};
  if (status.code == StatusCode::kPeerDead) return {StatusCode::kPeerUnreachable, status.raw};
  if (!status.ok()) return status;
  if (welcome.status != 0) return {StatusCode::kPeerRejected, static_cast<int32_t>(welcome.raw)};
  if (welcome.rail != target.rail_id) return StatusCode::kPeerRejected;
  return Doorbell::open(std::move(attempt.our_end), fds[0], getpid(), rooms_->waits, &link.target);
}

Status LocalRail::greet(const RailAddress& target, uint64_t deadline_ns, Attempt& attempt) {
  Outgoing& link = *attempt.link;
  if (const Status status = connect_abstract(target.socket, deadline_ns, &link.socket); !status.ok()) return status;
  const PeerCredentials peer = peer_credentials(link.socket.get());
  if (!peer.same_user || peer.pid != link.process->pid()) return StatusCode::kPeerRejected;

  WireMessage hello = wire_message(WireKind::kHello);
  hello.target_rail = target.rail_id;
  hello.rail = rooms_->reception.rail_id;
  hello.process_start = process_start(getpid());
  hello.entries = options_.ring_entries;
  UniqueFd their_end;
  if (const Status status = Doorbell::make(&attempt.our_end, &their_end); !status.ok()) return status;
  make_descriptor_room(their_end.get());
  const Status status = send_wire(link.socket.get(), hello,
                                  {attempt.segment_file.get(), rooms_->reception.board_file.get(), their_end.get()});
  return status.ok() ? status : Status(StatusCode::kPeerUnreachable, status.raw);
}

ForeignPath LocalRail::choose_foreign_path(const Outgoing& link) const {
  if (options_.foreign == ForeignChoice::kBounce) return ForeignPath::kBounce;
  if (options_.foreign == ForeignChoice::kCma) return ForeignPath::kKernelCopy;
  if (link.process->pid() == getpid()) return ForeignPath::kDirect;
  uint64_t value = 0;
  const iovec here{&value, sizeof value};
  const iovec there{reinterpret_cast<void*>(link.board().probe_address), sizeof value};
  const bool reached = process_vm_readv(link.process->pid(), &here, 1, &there, 1, 0) == sizeof value;
  return reached && value == link.board().probe_value ? ForeignPath::kKernelCopy : ForeignPath::kBounce;
}

// Of the next part that the handle has not got. kBusy: no answer came in time; with the next call it goes on.
Status LocalRail::ask(Outgoing& link, const RegionKey& key, uint64_t deadline_ns, RemoteHandle& remote,
                      WireMessage* answer) const {
  if (remote.question == nullptr) {
    const auto question = std::make_shared<Question>();
    WireMessage message = wire_message(WireKind::kShow);
    message.slot = key.slot;
    message.word = key.word;
    message.part = static_cast<uint32_t>(remote.files.size());
    message.number = question->number = ++link.asked;
    if (const Status status = send_wire(link.socket.get(), message, {-1, -1, -1}); !status.ok()) return status;
    std::erase_if(link.questions, [](const auto& one) { return one.expired(); });
    link.questions.push_back(question);
    remote.question = question;
  }
  while (!remote.question->answered) {
    WireMessage shown;
    FdPack fds;
    const Status status = await_wire(link.socket.get(), WireKind::kShown, deadline_ns, &shown, &fds);
    if (status.code == StatusCode::kTimeout) return {StatusCode::kBusy, status.raw};
    if (!status.ok()) return status;
    for (const auto& one : link.questions)
      if (const auto question = one.lock(); question && question->number == shown.number && !question->answered) {
        question->answered = true;
        question->answer = shown;
        question->file = std::move(fds[0]);
      }
    if (!remote.question->answered && now_ns() >= deadline_ns) return StatusCode::kBusy;
  }
  const std::shared_ptr<Question> question = std::move(remote.question);
  *answer = question->answer;
  if (answer->status == static_cast<uint32_t>(StatusCode::kStaleKey)) return StatusCode::kStaleKey;
  if (answer->status != 0) return {StatusCode::kPeerRejected, static_cast<int32_t>(answer->raw)};
  remote.files.push_back(std::move(question->file));
  return {};
}

Status LocalRail::attach(RailPeer& peer, std::string_view key, uint64_t patience_ns,
                         std::unique_ptr<RemoteMemory>* out) {
  if (*out == nullptr || !static_cast<RemoteHandle&>(**out).begun()) *out = std::make_unique<RemoteHandle>();
  auto& remote = static_cast<RemoteHandle&>(**out);
  Status status = look_up(peer, key, from_now(patience_ns), remote);
  if (status.code == StatusCode::kBusy) return status;
  if (status.ok() && (remote.access & kTraitDevice) != 0) status = StatusCode::kUnsupported;
  if (status.ok()) status = reach(remote, remote.files.front());
  remote.files.clear();
  if (!status.ok()) out->reset();
  return status;
}

Status LocalRail::look_up(RailPeer& peer, std::string_view key, uint64_t deadline_ns, RemoteHandle& remote) const {
  if (remote.link != nullptr) return {};
  RegionKey wanted;
  if (const Status status = decode_key(key, &wanted); !status.ok()) return status;
  const std::shared_ptr<Outgoing>& link = static_cast<PeerHandle&>(peer).link;
  if (link->lost.load(std::memory_order_acquire) || link->board().closed.load(std::memory_order_relaxed) != 0)
    return StatusCode::kPeerDead;
  WireMessage shown;
  if (const Status status = ask(*link, wanted, deadline_ns, remote, &shown); !status.ok()) return status;
  remote.slot = wanted.slot;
  remote.word = wanted.word;
  remote.mark = shown.mark;
  remote.life = shown.life;
  remote.base = shown.base;
  remote.length = shown.length;
  remote.access = shown.traits;
  if (remote.length == 0 || remote.base + remote.length < remote.base || remote.mark == 0)
    return StatusCode::kInvalidArgument;
  remote.link = link;
  return {};
}

Status LocalRail::reach(RemoteHandle& remote, const UniqueFd& file) const {
  Outgoing& link = *remote.link;
  if ((remote.access & kTraitByOwner) != 0) return {};
  const bool same_process = link.process->pid() == getpid();
  if (same_process && options_.foreign == ForeignChoice::kAuto) {
    remote.direct = reinterpret_cast<uint8_t*>(remote.base);
  } else if (file) {
    remote.mapping = rooms_->kept.find(remote);
    if (remote.mapping == nullptr) {
      const bool writes = (remote.access & kAccessRemoteWrite) != 0;
      const FileRole role = writes ? FileRole::kRegion : FileRole::kSealedRegion;
      if (const Status status = Mapping::open(role, file.get(), remote.length, &remote.mapping); !status.ok())
        return status;
      remote.mapping->populate(0, remote.length);
      rooms_->kept.keep(remote);
      rooms_->service.look_after_kept();
    }
    remote.direct = remote.mapping->data();
  }
  return {};
}

}  // namespace asyncfabric::local
