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
#include <cerrno>
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

// The lanes to a peer as they are opened, over the best protocol that both have. A rail that waits for the peer's word is asked for a moment,
// and again later. Control thread.
struct Core::Wiring {
  PeerId id = 0;
  uint64_t deadline_ns = 0;
  AddressBlob remote;
  std::vector<std::string> protocols;  // that were not tried, the best one last
  std::string protocol;
  std::vector<uint32_t> ours, theirs;  // rails of it
  std::vector<Lane> lanes;
  std::string apart;  // a protocol that both have, for processes of one host, which the two are not
  Status status = StatusCode::kPeerUnreachable;
  Pauses pauses;
  uint64_t first_turn_ns = kStrangersTurnNs;
};

void Core::wire_peer(PeerId id) {
  const auto wiring = std::make_shared<Wiring>();
  wiring->id = id;
  {
    const Moment moment(*this);
    Peer* peer = find_peer(id);
    if (peer == nullptr || peer->state != PeerState::kConnecting || peer->wired) return;
    if (!decode_address(peer->address, &wiring->remote)) return;
    wiring->deadline_ns = peer->connect_until_ns;
    if (peer->active) wiring->first_turn_ns = kControlTurnNs;
  }
  make_descriptor_room();
  const auto& preference = config.automatic ? kAutomaticPreference : kPreference;
  std::vector<std::string>& protocols = wiring->protocols;
  protocols.assign(std::begin(preference), std::end(preference));
  for (const auto& rail : rails)
    if (std::find(protocols.begin(), protocols.end(), rail->protocol) == protocols.end())
      protocols.push_back(rail->protocol);
  std::reverse(protocols.begin(), protocols.end());
  go_on_wiring(wiring);
}

// The next protocol that both have; false: there is none.
bool Core::choose_protocol(Wiring& wiring) {
  while (!wiring.protocols.empty()) {
    const std::string protocol = std::move(wiring.protocols.back());
    wiring.protocols.pop_back();
    std::vector<uint32_t> ours, theirs;
    for (uint32_t i = 0; i < rails.size(); ++i)
      if (rails[i]->protocol == protocol && (!rails[i]->capabilities.same_host_only || wiring.remote.host == host))
        ours.push_back(i);
    for (uint32_t i = 0; i < wiring.remote.rails.size(); ++i)
      if (wiring.remote.rails[i].protocol == protocol) theirs.push_back(i);
    if (!ours.empty() && !theirs.empty()) {
      if (!wiring.lanes.empty()) {
        const Moment moment(*this);
        wiring.lanes.clear();
      }
      wiring.protocol = protocol;
      wiring.ours = std::move(ours);
      wiring.theirs = std::move(theirs);
      return true;
    }
    const auto same = [&](const auto& rail) { return rail->protocol == protocol; };
    if (!theirs.empty() && std::any_of(rails.begin(), rails.end(), same)) wiring.apart = protocol;
  }
  return false;
}

void Core::go_on_wiring(const std::shared_ptr<Wiring>& wiring) {
  Wiring& now = *wiring;
  while (now.status.ok() ? now.lanes.size() < std::max(now.ours.size(), now.theirs.size()) : choose_protocol(now)) {
    const size_t k = now.lanes.size();
    Lane lane;
    lane.rail = now.ours[k % now.ours.size()];
    lane.remote_rail = now.theirs[k % now.theirs.size()];
    lane.address = now.remote.rails[lane.remote_rail].address;
    const uint64_t time = now_ns(), left = now.deadline_ns > time ? now.deadline_ns - time : 0;
    const uint64_t patience = connect_patience(*rails[lane.rail], now.pauses, left, now.first_turn_ns);
    now.status = at_rail(lane.rail, [&](Rail& rail) { return rail.connect(lane.address, patience, &lane.handle); });
    if (now.status.code == StatusCode::kBusy) {
      now.status = {};
      if (left != 0) return control.post_later(now.pauses.next_ns(), [this, wiring] { go_on_wiring(wiring); });
      now.status = {StatusCode::kPeerUnreachable, ETIMEDOUT};
    }
    now.lanes.push_back(std::move(lane));
  }
  wired(now);
}

void Core::wired(Wiring& wiring) {
  const Moment moment(*this);
  Peer* peer = find_peer(wiring.id);
  if (peer == nullptr || peer->state != PeerState::kConnecting || peer->wired)
    return wiring.lanes.clear();  // given up meanwhile, or wired by another job
  if (!wiring.status.ok()) {
    note_error(wiring.lanes.empty()
                   ? why_no_rail(wiring.apart)
                   : "connecting over " + wiring.protocol + " failed: " + status_text(wiring.status.code) + " (" +
                         std::to_string(wiring.status.raw) + ")" + no_descriptor());
    wiring.lanes.clear();
    return connect_failed(*peer, wiring.status);
  }
  peer->lanes = std::move(wiring.lanes);
  peer->protocol = wiring.protocol;
  peer->same_host = wiring.remote.host == host;
  peer->weights.clear();
  peer->reports_loss = true;
  for (const Lane& lane : peer->lanes) {
    peer->weights.push_back(rails[lane.rail]->weight);
    peer->reports_loss = peer->reports_loss && rails[lane.rail]->capabilities.reports_peer_loss;
  }
  peer->wired = true;
  for (const Lane& lane : peer->lanes)
    if (lane.handle->lost()) return on_peer_lost(*peer, StatusCode::kPeerDead);
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
  if (peer == nullptr && !has_room_for_hello(inbound)) {  // its sender repeats it
    tallies.messages_refused.add(1);
    return;
  }
  if (peer == nullptr) {
    peer = &make_peer(header.sender, std::string(from_bytes));
    peer->hello_came_over = inbound;
  }
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

// Hellos are repeated, and an answer waits in its rail while nobody takes it.
bool Core::is_answered(Peer& peer, uint64_t their_lane) {
  constexpr uint64_t kFirstNs = 10'000'000, kLongestNs = 1'000'000'000;
  const uint64_t now = now_ns(), lane = 1ull << their_lane;
  if (now >= peer.next_answer_ns) {
    peer.answer_gap_ns = peer.answer_gap_ns == 0 ? kFirstNs : std::min(peer.answer_gap_ns * 2, kLongestNs);
    peer.next_answer_ns = now + peer.answer_gap_ns;
    peer.answered_lanes = 0;
  }
  const bool answered = (peer.answered_lanes & lane) != 0;
  peer.answered_lanes |= lane;
  return answered;
}

void Core::answer_hello(Peer& peer, uint64_t their_lane) {
  if (!peer.met && peer.rejects == 0 && is_answered(peer, their_lane)) return;
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
