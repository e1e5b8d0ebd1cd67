// handshake.cc: how two fabrics become peers.
//   us                               them
//   rail.connect per lane
//   kHello(lane, our address, a nonce) -> make a peer of us, connect back (control thread)
//                              <---- kWelcome(lane, their counter generations)
//   all lanes welcomed: connected
// With a secret a hello carries a code instead of our counter generations, and kChallenge and kProof come before the welcome: admission.cc.
// Hellos are repeated until the deadline, so a lost one is not a hang; duplicates and crossing connects are harmless, because each
// side answers every hello and a connection carries only its owner's sends.
#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "base/descriptor_room.h"
#include "engine/core.h"
#include "engine/peers/greeting.h"

namespace asyncfabric {

namespace {

// Rails of one protocol can talk. Faster kinds first. Where rails were chosen by the machine, memory of a GPU has to get across too.
constexpr const char* kPreference[] = {"local", "cuda", "verbs", "efa", "tcp"};
constexpr const char* kAutomaticPreference[] = {"cuda", "local", "verbs", "efa", "tcp"};

struct Wiring {
  std::vector<Lane> lanes;
  std::string protocol;
  std::string apart;  // a protocol that both have, for processes of one host, which the two are not
  Status status = StatusCode::kPeerUnreachable;
};

std::string why_no_rail(const std::string& apart) {
  const std::string found = "the peer and this fabric have no rail of the same protocol that can reach across";
  if (apart.empty()) return found;
  return found + ": " + apart +
         " is for processes of one user, one host, one pid namespace and one network namespace, and the peer is of "
         "another one; tcp reaches it, where both name a network: rails=('auto', 'tcp:eth0')";
}

}  // namespace

std::string no_descriptor() {
  return descriptors_ran_out() ? "; this process has no file descriptor left (ulimit -n)" : "";
}

// Control thread: opens the lanes to a peer over the best protocol that both have.
void Core::wire_peer(PeerId id) {
  AddressBlob remote;
  uint64_t deadline = 0;
  {
    const Moment moment(*this);
    Peer* peer = find_peer(id);
    if (peer == nullptr || peer->state != PeerState::kConnecting || peer->wired) return;
    if (!decode_address(peer->address, &remote)) return;
    deadline = peer->connect_until_ns;
  }
  make_descriptor_room();
  const auto& preference = config.automatic ? kAutomaticPreference : kPreference;
  std::vector<std::string> protocols(std::begin(preference), std::end(preference));
  for (const auto& rail : rails)
    if (std::find(protocols.begin(), protocols.end(), rail->protocol) == protocols.end())
      protocols.push_back(rail->protocol);

  Wiring wiring;
  for (const std::string& protocol : protocols) {
    std::vector<uint32_t> ours, theirs;
    for (uint32_t i = 0; i < rails.size(); ++i)
      if (rails[i]->protocol == protocol && (!rails[i]->capabilities.same_host_only || remote.host == host))
        ours.push_back(i);
    for (uint32_t i = 0; i < remote.rails.size(); ++i)
      if (remote.rails[i].protocol == protocol) theirs.push_back(i);
    if (ours.empty() || theirs.empty()) {
      const auto same = [&](const auto& rail) { return rail->protocol == protocol; };
      if (!theirs.empty() && std::any_of(rails.begin(), rails.end(), same)) wiring.apart = protocol;
      continue;
    }
    wiring.lanes.clear();
    wiring.protocol = protocol;
    wiring.status = {};
    for (size_t k = 0; k < std::max(ours.size(), theirs.size()) && wiring.status.ok(); ++k) {
      Lane lane;
      lane.rail = ours[k % ours.size()];
      lane.remote_rail = theirs[k % theirs.size()];
      const uint64_t now = now_ns();
      lane.address = remote.rails[lane.remote_rail].address;
      wiring.status = at_rail(lane.rail, [&](Rail& rail) {
        return rail.connect(lane.address, deadline > now ? deadline - now : 0, &lane.handle);
      });
      wiring.lanes.push_back(std::move(lane));
    }
    if (wiring.status.ok()) break;
  }

  const Moment moment(*this);
  Peer* peer = find_peer(id);
  if (peer == nullptr || peer->state != PeerState::kConnecting)
    return;  // given up meanwhile; the lanes go with `wiring`
  if (!wiring.status.ok()) {
    note_error(wiring.lanes.empty()
                   ? why_no_rail(wiring.apart)
                   : "connecting over " + wiring.protocol + " failed: " + status_text(wiring.status.code) + " (" +
                         std::to_string(wiring.status.raw) + ")" + no_descriptor());
    connect_failed(*peer, wiring.status);
    return;
  }
  peer->lanes = std::move(wiring.lanes);
  peer->protocol = wiring.protocol;
  peer->same_host = remote.host == host;
  peer->weights.clear();
  peer->reports_loss = true;
  for (const Lane& lane : peer->lanes) {
    peer->weights.push_back(rails[lane.rail]->weight);
    peer->reports_loss = peer->reports_loss && rails[lane.rail]->capabilities.reports_peer_loss;
  }
  peer->wired = true;
  note_asynchronous(*peer, std::any_of(peer->lanes.begin(), peer->lanes.end(), [this](const Lane& lane) {
    return !rails[lane.rail]->capabilities.synchronous;
  }));
  for (uint64_t lane = 0; lane < kMaxMaskedLanes; ++lane)
    if ((peer->welcome_due >> lane & 1) != 0) answer_hello(*peer, lane);
  peer->welcome_due = 0;
  if (peer->active) send_hello(*peer);
  if (!peer->active && !has_secret()) connected(*peer);
  next_tick_ns = 0;
}

void Core::send_hello(Peer& peer) {
  peer.greeted = true;
  const uint64_t now = now_ns();
  peer.hello_gap_ns = peer.hello_gap_ns == 0 ? 20'000'000 : std::min<uint64_t>(peer.hello_gap_ns * 2, 500'000'000);
  peer.next_hello_ns = now + peer.hello_gap_ns;
  ByteWriter payload;
  payload.put_string<uint16_t>(address());
  payload.put(static_cast<uint8_t>(has_secret()));
  payload.put_raw(secret::text_of(peer.nonce));
  const std::string slice = generations.slice(0, kMaxMessageBytes - payload.text().size());
  for (uint32_t lane = 0; lane < peer.lanes.size(); ++lane) {
    if (peer.lanes[lane].welcomed) continue;
    if (has_secret())
      send_sealed(peer, lane, MessageType::kHello, greeting(lane, peer), payload.text());
    else
      send_message(peer, lane, MessageType::kHello, greeting(lane, peer), payload.text() + slice);
  }
}

void Core::on_hello(const MessageHeader& header, std::string_view payload, Inbound inbound) {
  ByteReader reader(payload);
  const std::string_view from_bytes = reader.get_string<uint16_t>();
  const bool sealed = reader.get<uint8_t>() != 0;
  secret::Nonce nonce{};
  const std::string_view rest = reader.rest();
  AddressBlob from;
  Greeting hello;
  if (!reader.ok() || rest.size() < nonce.size() || !read_greeting(header.value, kMaxMaskedLanes, &hello) ||
      !decode_address(from_bytes, &from) || from.incarnation != header.sender) {
    tallies.messages_refused.add(1);
    return;
  }
  rest.copy(nonce.data(), nonce.size());
  std::string_view slice = rest.substr(nonce.size());
  if (sealed != has_secret()) {
    refuse_hello(header, from, nonce, sealed ? SecretMismatch::kSenderHasOne : SecretMismatch::kSenderHasNone);
    return;
  }
  if (sealed && !unseal_message(header, inbound, &payload)) {
    refuse_hello(header, from, nonce, SecretMismatch::kTheyDiffer);
    return;
  }
  if (sealed) slice = {};
  if (const Peer* owner = find_peer(admission.owner(inbound));
      inbound.second != 0 && owner != nullptr && owner->incarnation != header.sender) {  // of another peer
    tallies.messages_refused.add(1);
    return;
  }
  const auto known = peer_of_incarnation.find(header.sender);
  Peer* peer = known == peer_of_incarnation.end() ? nullptr : known->second;
  if (peer != nullptr && peer->ended()) peer = nullptr;
  if (peer != nullptr && peer->their_life != 0 && peer->their_life != hello.life) {
    if (!is_later(hello.life, peer->their_life)) return;  // it was long on its way
    // They lost us and begin anew, so nothing that we still have under way with them counts for them.
    if (peer->state == PeerState::kConnected) {
      lose_peer(*peer, StatusCode::kPeerDead, PeerState::kLost);
      peer = nullptr;
    } else {
      for (Lane& each : peer->lanes) each.welcomed = false;
    }
  }
  if (peer == nullptr && !has_room_for_hello()) {  // its sender repeats it
    tallies.messages_refused.add(1);
    return;
  }
  if (peer == nullptr) peer = &make_peer(header.sender, std::string(from_bytes));
  begin_life(*peer, hello.life);
  if (has_secret()) {
    peer->their_nonce = nonce;
  } else if (!belongs(*peer, inbound)) {
    tallies.messages_refused.add(1);
    return;
  }
  peer->received = true;
  if (header.target != incarnation) {
    // They look for a process that had this address before us.
    peer->rejects = header.target;
  } else if (!has_secret()) {
    learn_generations(*peer, slice);
  }
  if (peer->wired) {
    answer_hello(*peer, hello.lane);
    return;
  }
  peer->welcome_due |= 1ull << hello.lane;
  connect(*peer);
}

void Core::answer_hello(Peer& peer, uint64_t their_lane) {
  const uint32_t lane = static_cast<uint32_t>(std::min<uint64_t>(their_lane, peer.lanes.size() - 1));
  if (peer.rejects != 0) {
    const uint64_t wanted = std::exchange(peer.rejects, 0);
    if (has_secret())
      send_sealed(peer, lane, MessageType::kReject, wanted, std::string(secret::text_of(peer.their_nonce)));
    else
      send_message(peer, lane, MessageType::kReject, wanted, {});
  } else if (has_secret()) {
    challenge(peer, their_lane);
  } else {
    send_welcome(peer, their_lane);
  }
}

void Core::send_welcome(Peer& peer, uint64_t their_lane) {
  const uint32_t lane = static_cast<uint32_t>(std::min<uint64_t>(their_lane, peer.lanes.size() - 1));
  peer.greeted = true;
  send_message(peer, lane, MessageType::kWelcome, greeting(their_lane, peer), generations.slice(0, kMaxMessageBytes));
}

void Core::on_welcome(Peer& peer, const MessageHeader& header, std::string_view payload) {
  Greeting welcome;
  if (!read_greeting(header.value, peer.lanes.size(), &welcome)) return;
  if (peer.their_life != 0 && peer.their_life != welcome.life && !is_later(welcome.life, peer.their_life)) return;
  begin_life(peer, welcome.life);
  learn_generations(peer, payload);
  peer.lanes[welcome.lane].welcomed = true;
  if (peer.state != PeerState::kConnecting) return;
  for (const Lane& lane : peer.lanes)
    if (!lane.welcomed) return;
  connected(peer);
}

}  // namespace asyncfabric
