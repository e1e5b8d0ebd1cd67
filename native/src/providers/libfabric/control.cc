// control.cc: life of a rail, its memory and its peers. Control thread, except disconnect().
#include <sys/random.h>

#include <algorithm>

#include "base/clock.h"
#include "providers/libfabric/device/errors.h"
#include "providers/libfabric/memory/cached_keys.h"
#include "providers/libfabric/peers/streams.h"
#include "providers/libfabric/rail.h"

namespace asyncfabric::libfabric {
namespace {

constexpr size_t kContexts = 4096;
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

}  // namespace

LibfabricRail::LibfabricRail(std::shared_ptr<Device> device, PostLimits post_limits)
    : device_(std::move(device)), post_limits_(post_limits), contexts_(std::make_unique<ContextPool>(kContexts)) {
  const fi_info& info = device_->info();
  capabilities_.ordered = keeps_order(info);
  capabilities_.read = true;
  capabilities_.max_request_bytes = std::min<uint64_t>(info.ep_attr->max_msg_size, 1ull << 30);
  if (const uint64_t most = device_->profile().most_open_bytes; most != 0)
    capabilities_.max_request_bytes = std::min(capabilities_.max_request_bytes, most / kPartsOpen);
  capabilities_.max_send_bytes = kPayloadBytes;
  names_connections_ = info.domain_attr->cq_data_size >= sizeof(uint64_t);
  handed_out_.reserve(256);
  backlogged_.reserve(256);
}

Status LibfabricRail::open(const Library& library, const Profile& profile, Info info, PostLimits post_limits,
                           std::unique_ptr<Rail>* out, std::string* detail) {
  if (info->domain_attr->cq_data_size < sizeof(uint32_t)) {
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
  std::unique_ptr<LibfabricRail> rail(new LibfabricRail(std::move(device), post_limits));
  Status status = MessageBuffers::open(*rail->device_, &rail->buffers_);
  if (status.ok()) status = rail->buffers_->post_all_receives();
  if (!status.ok()) {
    *detail = std::string("the message buffers of libfabric's provider ") +
              rail->device_->info().fabric_attr->prov_name + " could not be set up: " + library.fi_strerror(status.raw);
    return status;
  }
  *out = std::move(rail);
  return StatusCode::kOk;
}

// What libfabric holds pointers to is closed in order: endpoints, then buffers, then the device. After the endpoints are closed nothing
// reads or writes memory. Registrations that the engine still holds keep the domain.
LibfabricRail::~LibfabricRail() {
  if (buffers_ != nullptr) settle();
  for (const std::shared_ptr<PeerState>& peer : peers_) {
    peer->own_endpoint.reset();
    peer->endpoint = nullptr;
  }
  device_->close_endpoint();
  buffers_.reset();
  if (device_->profile().over_sockets) close_orphans_of(device_->endpoint_name());
}

// For what ofi-verbs settles: see verbs_profile.cc.
void LibfabricRail::settle() {
  if (const uint64_t settle_ns = device_->profile().settle_ns; settle_ns != 0)
    for (const uint64_t settled = now_ns() + settle_ns; now_ns() < settled;) progress_into_stash();
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

Status LibfabricRail::narrow_key(LocalMemory& memory, const KeyScope& scope, std::string* key) {
  return static_cast<Registration&>(memory).narrow(scope, key);
}

Status LibfabricRail::revoke_memory(LocalMemory& memory, uint64_t patience_ns, std::string* new_key) {
  auto& registration = static_cast<Registration&>(memory);
  registration.close();
  if (registration.remotely_accessible() && registration.handed_out)
    if (const Status status = fence(patience_ns, &registration.fence); !status.ok())
      return status;  // it has no key now; revoking again may succeed
  registration.fence = 0;
  return registration.renew(new_key);
}

Status LibfabricRail::release_memory(std::unique_ptr<LocalMemory>& memory, uint64_t patience_ns) {
  auto& registration = static_cast<Registration&>(*memory);
  registration.close();
  if (registration.remotely_accessible() && registration.handed_out)
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

Status LibfabricRail::require_admission() {
  admitted_.require();
  return StatusCode::kOk;
}

// A fence has to ask whoever may write, so a connection that did not introduce itself is not admitted.
bool LibfabricRail::admit(uint64_t connection) {
  if (device_->profile().fence_on_release && !admitted_.takes(connection_tag(connection))) {
    RailAddress sender;
    if (!admitted_.take(connection, &sender)) return false;
    enter_inbound(connection, std::move(sender));
  }
  admitted_.add(connection);
  return true;
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
  state->endpoint = device_->endpoint();
  if (device_->profile().endpoint_per_peer)
    if (const Status status = open_own_endpoint(*state); !status.ok()) return status;
  if (fi_av_insert(device_->av(), remote.name.data(), 1, &state->address, 0, nullptr) != 1)
    return StatusCode::kInvalidArgument;
  peers_.push_back(state);
  admitted_.opened(state->connection);
  *out = state;
  return introduce(*state);
}

Status LibfabricRail::open_own_endpoint(PeerState& peer) {
  std::string detail;
  if (const Status status = device_->open_endpoint(&peer.own_endpoint, &detail); !status.ok()) return status;
  peer.endpoint = peer.own_endpoint.get();
  (void)Device::name_of(*peer.own_endpoint, &peer.own_name);
  return StatusCode::kOk;
}

Status LibfabricRail::attach(RailPeer&, std::string_view key, uint64_t, std::unique_ptr<RemoteMemory>* out) {
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

// Fails what libfabric never took. What it took is flushed where the peer has an endpoint of its own, whose end keeps everybody off our
// memory.
bool LibfabricRail::flush(PeerState& peer) {
  peer.closed = true;
  end_doubt(peer, StatusCode::kPeerDead);
  while (peer.backlog != nullptr) finish(*peer.leave_backlog(), StatusCode::kPeerDead);
  const bool silent = peer.submitted == 0;
  if (!silent && peer.own_endpoint == nullptr) return false;
  if (peer.own_endpoint != nullptr) {
    if (device_->profile().settle_ns != 0) progress_into_stash();
    peer.own_endpoint.reset();
    progress_into_stash();  // nothing in the CQ may name a context that is given back below
  }
  peer.endpoint = nullptr;
  while (!peer.requests.empty()) finish(*peer.requests.head, StatusCode::kPeerDead);
  if (peer.address != FI_ADDR_UNSPEC) (void)fi_av_remove(device_->av(), &peer.address, 1, 0);
  peer.address = FI_ADDR_UNSPEC;
  return true;
}

// By number, and out of the list last: flush() reads the CQ, and a message that is found there may open a connection.
void LibfabricRail::forget_finished_peers() {
  for (size_t i = 0; i < peers_.size();) {
    const bool used = peers_[i].use_count() > 1 || !peers_[i]->requests.empty() || peers_[i]->in_backlog;
    if (!used && !peers_[i]->closed) (void)flush(*peers_[i]);
    if (used || peers_[i]->in_backlog)
      ++i;
    else
      peers_.erase(peers_.begin() + static_cast<ptrdiff_t>(i));
  }
}

}  // namespace asyncfabric::libfabric
