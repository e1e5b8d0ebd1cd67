// control.cc: life of a rail, its memory and its peers. Control thread, except disconnect().
#include <sys/random.h>

#include <algorithm>

#include "base/clock.h"
#include "providers/libfabric/cached_keys.h"
#include "providers/libfabric/cemetery.h"
#include "providers/libfabric/errors.h"
#include "providers/libfabric/orphans.h"
#include "providers/libfabric/process.h"
#include "providers/libfabric/rail.h"
#include "providers/libfabric/segment_request.h"

namespace asyncfabric::libfabric {
namespace {

constexpr size_t kContexts = 4096;
constexpr uint64_t kSettleNs = 500'000'000;
constexpr uint64_t kPartsOpen = 8;  // requests of the greatest length that fill what may be open

// Order as the contract means it: writes to one peer become visible in order and an immediate never overtakes data.
bool keeps_order(const fi_info& info) {
  const uint64_t both = info.tx_attr->msg_order & info.rx_attr->msg_order;
  return (both & FI_ORDER_WAW) != 0 || (both & FI_ORDER_RMA_WAW) != 0;
}

double link_gbits(const fi_info& info) {
  if (info.nic == nullptr || info.nic->link_attr == nullptr) return 0;
  return static_cast<double>(info.nic->link_attr->speed) / 1e9;
}

std::string dotted(uint32_t version) {
  return std::to_string(FI_MAJOR(version)) + "." + std::to_string(FI_MINOR(version));
}

void close_own_endpoint(const Device& device, PeerState& peer) {
  if (device.profile().same_host_only && !peer.same_process)
    close_shm_endpoint(peer.own_endpoint);
  else
    peer.own_endpoint.reset();
}

}  // namespace

LibfabricRail::LibfabricRail(std::shared_ptr<Device> device, Pace pace)
    : device_(std::move(device)), pace_(pace), contexts_(std::make_unique<ContextPool>(kContexts)) {
  const fi_info& info = device_->info();
  capabilities_.ordered = keeps_order(info);
  capabilities_.read = device_->profile().can_read;
  capabilities_.reports_peer_loss = device_->profile().same_host_only;
  capabilities_.same_host_only = device_->profile().same_host_only;
  capabilities_.max_request_bytes = std::min<uint64_t>(info.ep_attr->max_msg_size, 1ull << 30);
  if (const uint64_t most = device_->profile().most_open_bytes; most != 0)
    capabilities_.max_request_bytes = std::min(capabilities_.max_request_bytes, most / kPartsOpen);
  capabilities_.max_send_bytes = kPayloadBytes;
  names_connections_ = !device_->profile().traps_dead_keys && info.domain_attr->cq_data_size >= sizeof(uint64_t);
  handed_out_.reserve(256);
  backlogged_.reserve(256);
}

Status LibfabricRail::open(const Library& library, const Profile& profile, Info info, Pace pace,
                           std::unique_ptr<Rail>* out, std::string* detail) {
  const size_t data_bytes = profile.traps_dead_keys ? sizeof(uint64_t) : sizeof(uint32_t);
  if (info->domain_attr->cq_data_size < data_bytes) {
    *detail = std::string("libfabric's provider ") + info->fabric_attr->prov_name + " carries no 32-bit immediates";
    return StatusCode::kUnsupported;
  }
  std::unique_ptr<Device> device;
  if (const Status status = Device::open(library, profile, std::move(info), &device, detail); !status.ok())
    return status;
  if (profile.keys_may_be_cached && hands_out_cached_keys(*device)) {
    *detail =
        "libfabric keeps registrations in a cache (FI_MR_CACHE_MAX_COUNT is not 0, or another library of this process "
        "asked first): revoked keys would still write";
    return StatusCode::kUnsupported;
  }
  std::unique_ptr<LibfabricRail> rail(new LibfabricRail(std::move(device), pace));
  Status status = MessageBuffers::open(*rail->device_, &rail->buffers_);
  if (status.ok()) status = rail->buffers_->post_all_receives();
  if (!status.ok()) {
    *detail = std::string("the message buffers of libfabric's provider ") +
              rail->device_->info().fabric_attr->prov_name + " could not be set up: " + library.fi_strerror(status.raw);
    return status;
  }
  if (profile.same_host_only) {
    note_open(rail->device_->endpoint_name());
    rail->own_segment_ = SegmentLock::open(shm_segment_name(rail->device_->endpoint_name()));
    rail->guests_ = SegmentGuests::open(*rail->device_);
    if (const Status watched = SegmentWarden::shared(&rail->warden_, detail); !watched.ok()) return watched;
  }
  *out = std::move(rail);
  return StatusCode::kOk;
}

// Everything that libfabric holds pointers to, closed in order: endpoints, then buffers, then the device.
struct LibfabricRail::Everything final : Remains {
  std::shared_ptr<Device> device;
  std::unique_ptr<ContextPool> contexts;
  std::unique_ptr<MessageBuffers> buffers;
  std::vector<std::shared_ptr<PeerState>> peers;

  void close_endpoints() override {
    for (const std::shared_ptr<PeerState>& peer : peers) {
      close_own_endpoint(*device, *peer);
      peer->endpoint = nullptr;
    }
    device->close_endpoint();
    buffers.reset();
    if (device->profile().over_sockets) close_orphans_of(device->endpoint_name());
  }
};

// After the endpoints are closed nothing reads or writes memory. Registrations that the engine still holds keep the domain.
LibfabricRail::~LibfabricRail() {
  auto everything = std::make_unique<Everything>();
  if (buffers_ != nullptr) settle();
  everything->device = device_;
  everything->contexts = std::move(contexts_);
  everything->buffers = std::move(buffers_);
  everything->peers = std::move(peers_);
  if (capabilities_.same_host_only)
    note_closed(device_->endpoint_name(), std::move(everything));
  else
    everything->close_endpoints();
}

// shm: the target fetches from our memory, also after our endpoint is closed. So let it finish what it has, for a while, and read the
// requests of our endpoints, so that no segment is left behind.
// verbs: see its profile.
void LibfabricRail::settle() {
  if (const uint64_t settle_ns = device_->profile().settle_ns; settle_ns != 0)
    for (const uint64_t settled = now_ns() + settle_ns; now_ns() < settled;) progress_into_stash();
  if (!capabilities_.same_host_only) return;
  const uint64_t deadline = now_ns() + kSettleNs;
  std::vector<std::unique_ptr<Segment>> segments;
  for (const std::shared_ptr<PeerState>& peer : peers_)
    if (peer->own_endpoint != nullptr && !peer->same_process)
      if (auto segment = Segment::of(peer->own_endpoint.get())) segments.push_back(std::move(segment));
  const auto busy = [](const std::shared_ptr<PeerState>& peer) { return peer->submitted > 0 && !peer->same_process; };
  const auto unread = [](const std::unique_ptr<Segment>& segment) { return has_unread_request(*segment); };
  const auto unfinished = [&] {
    return std::any_of(peers_.begin(), peers_.end(), busy) || std::any_of(segments.begin(), segments.end(), unread) ||
           sweep_left_behind() > 0;
  };
  while (unfinished() && now_ns() < deadline) {
    progress_into_stash();
    watch_processes();
  }
}

RailInfo LibfabricRail::info() const {
  const fi_info& info = device_->info();
  RailInfo out;
  out.provider = device_->profile().name;
  out.device = info.domain_attr->name;
  out.library = device_->library().path;
  out.version = device_->library().version + ", provider " + info.fabric_attr->prov_name + " " +
                dotted(info.fabric_attr->prov_version);
  out.gbits_per_s = link_gbits(info);
  out.ordered = capabilities_.ordered;
  out.can_read = capabilities_.read;
  return out;
}

RailAddress LibfabricRail::own_address() const {
  RailAddress address;
  address.provider = provider_hash(device_->info().fabric_attr->prov_name);
  address.scratch_key = buffers_->scratch_key();
  address.scratch_base = buffers_->scratch_address();
  address.name = device_->endpoint_name();
  return address;
}

std::string LibfabricRail::address() const { return encode(own_address()); }

Status LibfabricRail::register_memory(const Memory& memory, std::unique_ptr<LocalMemory>* out, std::string* key) {
  std::unique_ptr<Registration> registration;
  if (const Status status = Registration::create(device_, memory, &registration, key); !status.ok()) return status;
  *out = std::move(registration);
  return StatusCode::kOk;
}

Status LibfabricRail::revoke_memory(LocalMemory& memory, uint64_t patience_ns, std::string* new_key) {
  auto& registration = static_cast<Registration&>(memory);
  registration.close();
  if (registration.remotely_accessible())
    if (const Status status = fence(patience_ns, &registration.fence); !status.ok())
      return status;  // it has no key now; revoking again may succeed
  registration.fence = 0;
  return registration.renew(new_key);
}

Status LibfabricRail::release_memory(std::unique_ptr<LocalMemory>& memory, uint64_t patience_ns) {
  auto& registration = static_cast<Registration&>(*memory);
  registration.close();
  if (registration.remotely_accessible())
    if (const Status status = fence(patience_ns, &registration.fence); !status.ok()) return status;
  memory.reset();
  return StatusCode::kOk;
}

Status LibfabricRail::connect(std::string_view address, uint64_t, std::unique_ptr<RailPeer>* out) {
  RailAddress remote;
  if (!parse(address, &remote)) return StatusCode::kInvalidArgument;
  forget_finished_peers();
  std::shared_ptr<PeerState> state;
  if (const Status status = open_peer(remote, &state); !status.ok()) return status;
  *out = std::make_unique<PeerHandle>(state);
  return StatusCode::kOk;
}

Status LibfabricRail::open_peer(const RailAddress& remote, std::shared_ptr<PeerState>* out) {
  const fi_info& info = device_->info();
  if (!valid_endpoint_name(remote.name, info.addr_format, device_->profile().name_bytes))
    return StatusCode::kInvalidArgument;
  if (remote.provider != provider_hash(info.fabric_attr->prov_name)) return StatusCode::kPeerUnreachable;
  auto state = std::make_shared<PeerState>();
  state->remote = remote;
  if (getrandom(&state->connection, sizeof state->connection, 0) != sizeof state->connection)
    return {StatusCode::kInternal, errno};
  if (capabilities_.same_host_only) {
    state->process = ProcessWatch::open(remote.name);
    if (state->process == nullptr || state->process->ended()) return StatusCode::kPeerUnreachable;
    if (guests_ != nullptr && !guests_->may_call(remote.name)) return StatusCode::kPeerUnreachable;
    state->segment = SegmentLock::open(shm_segment_name(remote.name));
    warden_->watch(shm_owner(shm_segment_name(remote.name)));
    state->same_process = note_link(device_->endpoint_name(), remote.name);
    // libfabric would follow the pointer of a segment that this process has unmapped.
    if (!state->same_process && is_own_shm_name(remote.name)) return StatusCode::kPeerUnreachable;
  }
  state->endpoint = device_->endpoint();
  std::string detail;
  if (device_->profile().endpoint_per_peer) {
    if (const Status status = device_->open_endpoint(&state->own_endpoint, &detail); !status.ok()) return status;
    state->endpoint = state->own_endpoint.get();
  }
  if (const PeerState* known = sharer_of(*state); known != nullptr)
    state->address = known->address;
  else if (fi_av_insert(device_->av(), remote.name.data(), 1, &state->address, 0, nullptr) != 1)
    return StatusCode::kInvalidArgument;
  if (guests_ != nullptr && !guests_->holds(remote.name)) {
    (void)fi_av_remove(device_->av(), &state->address, 1, 0);
    return StatusCode::kPeerUnreachable;
  }
  peers_.push_back(state);
  *out = state;
  return introduce(*state);
}

// shm: another connection to the same rail. libfabric counts insertions of a name but not who uses the segment behind it: the first
// removal unmaps it, under the feet of the others.
const PeerState* LibfabricRail::sharer_of(const PeerState& peer) const {
  if (!capabilities_.same_host_only) return nullptr;
  for (const std::shared_ptr<PeerState>& other : peers_)
    if (other.get() != &peer && other->address != FI_ADDR_UNSPEC && other->remote.name == peer.remote.name)
      return other.get();
  return nullptr;
}

Status LibfabricRail::attach(RailPeer&, std::string_view key, std::unique_ptr<RemoteMemory>* out) {
  MemoryKey parts;
  if (!parse(key, &parts)) return StatusCode::kInvalidArgument;
  if (parts.provider != provider_hash(device_->info().fabric_attr->prov_name)) return StatusCode::kInvalidArgument;
  *out = std::make_unique<RemoteRegion>(parts);
  return StatusCode::kOk;
}

Status LibfabricRail::disconnect(RailPeer& peer) {
  PeerState& state = *state_of(&peer);
  return flush(state) ? StatusCode::kOk : StatusCode::kUnsupported;
}

// Fails what libfabric never took. What it took is only flushed where closing the endpoint keeps everybody off our memory:
// over sockets always; over shm, where the target fetches from us, only when the target's process is gone.
bool LibfabricRail::flush(PeerState& peer) {
  peer.closed = true;
  end_doubt(peer, StatusCode::kPeerDead);
  while (peer.backlog != nullptr) {
    Context* context = peer.backlog;
    peer.backlog = context->next;
    if (!context->done) finish(*context, StatusCode::kPeerDead);
  }
  const bool silent = peer.submitted == 0;
  const bool can_silence = peer.own_endpoint != nullptr && (peer.lost || !capabilities_.same_host_only);
  if (!silent && !can_silence) return false;
  if (peer.same_process) return true;  // stays mapped until the rail goes
  if (peer.own_endpoint != nullptr) {
    if (device_->profile().settle_ns != 0) progress_into_stash();
    close_own_endpoint(*device_, peer);
    progress_into_stash();  // nothing in the CQ may name a context that is given back below
  }
  peer.endpoint = nullptr;
  while (!peer.requests.empty()) finish(*peer.requests.head, StatusCode::kPeerDead);
  if (peer.address != FI_ADDR_UNSPEC && sharer_of(peer) == nullptr)
    (void)fi_av_remove(device_->av(), &peer.address, 1, 0);
  peer.address = FI_ADDR_UNSPEC;
  return true;
}

// By number, and out of the list last: flush() reads the CQ, and a message that is found there may open a connection.
void LibfabricRail::forget_finished_peers() {
  for (size_t i = 0; i < peers_.size();) {
    const bool used = peers_[i].use_count() > 1 || !peers_[i]->requests.empty() || peers_[i]->in_backlog;
    if (!used && !peers_[i]->closed && !peers_[i]->same_process) (void)flush(*peers_[i]);
    if (used || peers_[i]->in_backlog || peers_[i]->same_process)
      ++i;
    else
      peers_.erase(peers_.begin() + static_cast<ptrdiff_t>(i));
  }
}

}  // namespace asyncfabric::libfabric
