#define _GNU_SOURCE
#include "_ucx_worker.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum {
    MESSAGES_PER_PEER = 4096,
    OPERATION_BYTES = 4 << 20, /* a long run is cut, so that a deadline or another peer need not wait for all of it */
    TURN_BYTES = 16 << 20,     /* posted per batch and turn, where a GET completes in the call that posts it */
};

/* UCX reports through its descriptor; these bound the harm if it once does not. */
static const double SLEEP_BUSY_S = 0.05, SLEEP_IDLE_S = 5.0;

double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int fail(Worker *w, char *error, const char *what, ucs_status_t status)
{
    snprintf(error, TEXT_BYTES, "%s: %s", what, w->ucx.ucs_status_string(status));
    return -1;
}

/* ---- events ---- */

static Event *event_new(Worker *w, EventKind kind, int64_t id)
{
    Event *event = calloc(1, sizeof *event);
    if (event == NULL)
        return NULL;
    event->kind = kind;
    event->id = id;
    if (w->last_event != NULL)
        w->last_event->next = event;
    else
        w->first_event = event;
    w->last_event = event;
    return event;
}

Event *worker_take_events(Worker *w)
{
    Event *first = w->first_event;
    w->first_event = w->last_event = NULL;
    return first;
}

void event_free(Event *event)
{
    free(event->data);
    free(event);
}

/* ---- messages ---- */

/* What must stay until UCX has sent it: the header, and the payload unless it lies in registered memory. */
typedef struct {
    Worker *worker;
    size_t *counter;
    char bytes[];
} Message;

static void on_sent(void *request, ucs_status_t status, void *argument)
{
    (void)status; /* a lost peer is reported once, by on_error */
    Message *message = argument;
    --*message->counter;
    message->worker->ucx.ucp_request_free(request);
    free(message);
}

int message_send(Worker *w, ucp_ep_h endpoint, unsigned id, const void *header, size_t header_bytes,
                 const void *payload, size_t payload_bytes, ucp_mem_h memory, size_t *counter, char *error)
{
    size_t kept = memory == NULL ? payload_bytes : 0;
    Message *message = malloc(sizeof *message + header_bytes + kept);
    if (message == NULL)
        return fail(w, error, "message", UCS_ERR_NO_MEMORY);
    message->worker = w;
    message->counter = counter;
    memcpy(message->bytes, header, header_bytes);
    if (kept > 0)
        payload = memcpy(message->bytes + header_bytes, payload, kept);
    ucp_request_param_t params = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS |
                        (memory == NULL ? 0 : UCP_OP_ATTR_FIELD_MEMH),
        .flags = UCP_AM_SEND_FLAG_EAGER,
        .cb = {.send = on_sent},
        .user_data = message,
        .memh = memory,
    };
    ucs_status_ptr_t request =
        w->ucx.ucp_am_send_nbx(endpoint, id, message->bytes, header_bytes, payload, payload_bytes, &params);
    if (UCS_PTR_IS_PTR(request)) {
        ++*counter;
        return 0;
    }
    free(message);
    return request == NULL ? 0 : fail(w, error, "message", UCS_PTR_STATUS(request));
}

/* ---- peers ---- */

Peer *worker_peer(Worker *w, int64_t id)
{
    for (Peer *peer = w->peers; peer != NULL; peer = peer->next)
        if (peer->id == id && !peer->closed)
            return peer;
    return NULL;
}

static void peer_lost(Peer *peer, ucs_status_t status, const char *text)
{
    if (peer->lost || peer->closed)
        return;
    peer->lost = true;
    peer->status = status;
    Event *event = event_new(peer->worker, EVENT_LOST, peer->id);
    if (event != NULL)
        snprintf(event->text, TEXT_BYTES, "%s", text);
}

static void on_error(void *argument, ucp_ep_h endpoint, ucs_status_t status)
{
    (void)endpoint;
    Peer *peer = argument;
    peer_lost(peer, status, peer->worker->ucx.ucs_status_string(status));
}

static bool peer_idle(const Peer *peer)
{
    return peer->operation_count == 0 && peer->message_count == 0 && peer->flush_count == 0;
}

static bool peer_used(const Worker *w, const Peer *peer)
{
    for (const Batch *batch = w->batches; batch != NULL; batch = batch->next)
        if (batch->peer == peer)
            return true;
    return false;
}

/* Frees closed peers that no callback can name any more. */
static void sweep_peers(Worker *w)
{
    for (Peer **at = &w->peers; *at != NULL;) {
        Peer *peer = *at;
        if (!peer->closed || peer->endpoint != NULL || !peer_idle(peer) || peer_used(w, peer)) {
            at = &peer->next;
            continue;
        }
        for (size_t i = 0; i < peer->key_count; i++)
            w->ucx.ucp_rkey_destroy(peer->keys[i].key);
        *at = peer->next;
        free(peer->keys);
        free(peer);
    }
}

static void on_connected(void *request, ucs_status_t status, void *argument)
{
    Peer *peer = argument;
    peer->flush_count--;
    peer->flushed = status == UCS_OK;
    if (status != UCS_OK)
        peer_lost(peer, status, peer->worker->ucx.ucs_status_string(status));
    if (request != NULL)
        peer->worker->ucx.ucp_request_free(request);
}

static void greet(Worker *w, Peer *peer)
{
    char error[TEXT_BYTES];
    ucp_address_t *address;
    size_t address_bytes;
    peer->greeted = true;
    if (worker_address(w, &address, &address_bytes, error) != 0) {
        peer_lost(peer, UCS_ERR_NO_MEMORY, error);
        return;
    }
    size_t nbytes = sizeof(uint32_t) + w->name_bytes + address_bytes;
    char *payload = malloc(nbytes);
    if (payload != NULL) {
        uint32_t name_bytes = (uint32_t)w->name_bytes;
        memcpy(payload, &name_bytes, sizeof name_bytes);
        memcpy(payload + sizeof name_bytes, w->name, w->name_bytes);
        memcpy(payload + sizeof name_bytes + w->name_bytes, address, address_bytes);
        Hello hello = {peer->nonce};
        if (message_send(w, peer->endpoint, AM_HELLO, &hello, sizeof hello, payload, nbytes, NULL,
                         &peer->message_count, error) != 0)
            peer_lost(peer, UCS_ERR_UNREACHABLE, error);
    }
    free(payload);
    w->ucx.ucp_worker_release_address(w->worker, address);
}

static Peer *peer_by_nonce(Worker *w, uint64_t nonce)
{
    for (Peer *peer = w->peers; peer != NULL; peer = peer->next)
        if (peer->nonce == nonce && !peer->lost && !peer->closed)
            return peer;
    return NULL;
}

/* Whether GET is done by the kernel or by hardware over this endpoint's lanes, and not by messages. */
static bool reads_directly(Worker *w, Peer *peer)
{
    static const char *const able[] = {"cma", "knem", "xpmem", "rc", "dc", "srd"};
    ucp_transport_entry_t entries[32];
    ucp_ep_attr_t attributes = {.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS};
    attributes.transports.entries = entries;
    attributes.transports.num_entries = sizeof entries / sizeof entries[0];
    attributes.transports.entry_size = sizeof entries[0];
    if (!w->direct || w->ucx.ucp_ep_query(peer->endpoint, &attributes) != UCS_OK)
        return false;
    for (unsigned i = 0; i < attributes.transports.num_entries; i++) {
        const char *name = entries[i].transport_name;
        for (size_t k = 0; k < sizeof able / sizeof able[0]; k++) {
            size_t length = strlen(able[k]);
            if (strncmp(name, able[k], length) == 0 && (name[length] == '\0' || name[length] == '_'))
                return true;
        }
    }
    return false;
}

static ucs_status_t on_welcome(void *argument, const void *header, size_t header_bytes, void *data, size_t nbytes,
                               const ucp_am_recv_param_t *param)
{
    (void)data, (void)nbytes, (void)param;
    Worker *w = argument;
    Hello hello;
    if (header_bytes != sizeof hello)
        return UCS_OK;
    memcpy(&hello, header, sizeof hello);
    Peer *peer = peer_by_nonce(w, hello.nonce);
    if (peer != NULL && !peer->ready) {
        peer->ready = true;
        peer->direct = reads_directly(w, peer);
        event_new(w, EVENT_READY, peer->id);
    }
    return UCS_OK;
}

static ucs_status_t on_bye(void *argument, const void *header, size_t header_bytes, void *data, size_t nbytes,
                           const ucp_am_recv_param_t *param)
{
    (void)data, (void)nbytes, (void)param;
    Worker *w = argument;
    Hello hello;
    if (header_bytes != sizeof hello)
        return UCS_OK;
    memcpy(&hello, header, sizeof hello);
    Peer *peer = peer_by_nonce(w, hello.nonce);
    if (peer != NULL)
        peer_lost(peer, UCS_ERR_CONNECTION_RESET, "the peer closed");
    serve_bye(w, hello.nonce);
    return UCS_OK;
}

static int by_address(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static int unpack_keys(Worker *w, Peer *peer, const PackedKey *keys, size_t count, char *error)
{
    peer->keys = calloc(count + 1, sizeof *peer->keys);
    if (peer->keys == NULL)
        return fail(w, error, "keys", UCS_ERR_NO_MEMORY);
    for (size_t i = 0; i < count; i++) {
        Key *key = &peer->keys[i];
        ucs_status_t status = w->ucx.ucp_ep_rkey_unpack(peer->endpoint, keys[i].data, &key->key);
        if (status != UCS_OK)
            return fail(w, error, "the peer's memory key", status);
        key->address = keys[i].address;
        key->nbytes = keys[i].nbytes;
        peer->key_count++;
    }
    qsort(peer->keys, count, sizeof *peer->keys, by_address);
    return 0;
}

int64_t worker_connect(Worker *w, const void *address, const PackedKey *keys, size_t key_count, double deadline,
                       char *error)
{
    Peer *peer = calloc(1, sizeof *peer);
    if (peer == NULL)
        return fail(w, error, "peer", UCS_ERR_NO_MEMORY);
    peer->worker = w;
    peer->operations.next = peer->operations.previous = &peer->operations;
    peer->connect_deadline = deadline;
    if (getrandom(&peer->nonce, sizeof peer->nonce, 0) != sizeof peer->nonce) {
        free(peer);
        return fail(w, error, "connect", UCS_ERR_NO_RESOURCE);
    }
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = address,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = on_error, .arg = peer},
    };
    ucs_status_t status = w->ucx.ucp_ep_create(w->worker, &params, &peer->endpoint);
    if (status != UCS_OK) {
        free(peer);
        return fail(w, error, "connect", status);
    }
    peer->id = ++w->last_id;
    peer->next = w->peers;
    w->peers = peer;
    if (unpack_keys(w, peer, keys, key_count, error) != 0) {
        peer->closed = true;
        close_endpoint(w, &peer->endpoint, UCP_EP_CLOSE_FLAG_FORCE, now() + 1);
        sweep_peers(w);
        return -1;
    }
    ucp_request_param_t flush = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb = {.send = on_connected},
        .user_data = peer,
    };
    peer->flush_count++;
    ucs_status_ptr_t request = w->ucx.ucp_ep_flush_nbx(peer->endpoint, &flush);
    if (!UCS_PTR_IS_PTR(request))
        on_connected(NULL, UCS_PTR_STATUS(request), peer);
    return peer->id;
}

/* ---- memory ---- */

static int find(const void *table, size_t count, size_t stride, uint64_t address)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (*(const uint64_t *)((const char *)table + middle * stride) <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return (int)low - 1;
}

Region *region_at(const Worker *w, uint64_t address)
{
    int i = find(w->regions, w->region_count, sizeof *w->regions, address);
    if (i < 0 || address - w->regions[i].address >= w->regions[i].nbytes)
        return NULL;
    return &w->regions[i];
}

static Key *key_at(const Peer *peer, uint64_t address)
{
    int i = find(peer->keys, peer->key_count, sizeof *peer->keys, address);
    if (i < 0 || address - peer->keys[i].address >= peer->keys[i].nbytes)
        return NULL;
    return &peer->keys[i];
}

int64_t worker_register(Worker *w, uint64_t address, uint64_t nbytes, void **key, size_t *key_bytes, char *error)
{
    for (size_t i = 0; i < w->region_count; i++) {
        const Region *other = &w->regions[i];
        if (address < other->address + other->nbytes && other->address < address + nbytes) {
            snprintf(error, TEXT_BYTES, "this memory overlaps a region that is registered already");
            return -1;
        }
    }
    Region *grown = realloc(w->regions, (w->region_count + 1) * sizeof *grown);
    if (grown == NULL)
        return fail(w, error, "register", UCS_ERR_NO_MEMORY);
    w->regions = grown;
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
        .address = (void *)(uintptr_t)address,
        .length = nbytes,
    };
    Region region = {.address = address, .nbytes = nbytes, .id = ++w->last_id};
    ucs_status_t status = w->ucx.ucp_mem_map(w->context, &params, &region.memory);
    if (status != UCS_OK)
        return fail(w, error, "register memory", status);
    status = w->ucx.ucp_rkey_pack(w->context, region.memory, key, key_bytes);
    if (status != UCS_OK) {
        w->ucx.ucp_mem_unmap(w->context, region.memory);
        return fail(w, error, "pack the memory key", status);
    }
    w->regions[w->region_count++] = region;
    qsort(w->regions, w->region_count, sizeof *w->regions, by_address);
    return region.id;
}

int worker_unregister(Worker *w, int64_t id, char *error)
{
    size_t i = 0;
    while (i < w->region_count && w->regions[i].id != id)
        i++;
    if (i == w->region_count) {
        snprintf(error, TEXT_BYTES, "no such region");
        return -1;
    }
    if (w->batches != NULL) {
        snprintf(error, TEXT_BYTES, "memory cannot be unregistered while transfers run");
        return -1;
    }
    ucs_status_t status = w->ucx.ucp_mem_unmap(w->context, w->regions[i].memory);
    memmove(&w->regions[i], &w->regions[i + 1], (--w->region_count - i) * sizeof *w->regions);
    return status == UCS_OK ? 0 : fail(w, error, "unregister memory", status);
}

int worker_address(Worker *w, ucp_address_t **address, size_t *nbytes, char *error)
{
    ucs_status_t status = w->ucx.ucp_worker_get_address(w->worker, address, nbytes);
    return status == UCS_OK ? 0 : fail(w, error, "worker address", status);
}

/* ---- transfers ---- */

static void batch_failed(Worker *w, Batch *batch, Failure failure, const char *text)
{
    if (batch->over)
        return;
    batch->over = true;
    Event *event = event_new(w, EVENT_FAILED, batch->ticket);
    if (event == NULL)
        return;
    event->failure = failure;
    snprintf(event->text, TEXT_BYTES, "%s", text);
}

static void peer_batches_failed(Worker *w, Peer *peer, Failure failure, const char *text)
{
    for (Batch *batch = w->batches; batch != NULL; batch = batch->next)
        if (batch->peer == peer)
            batch_failed(w, batch, failure, text);
}

static Failure failure_of(const Peer *peer, ucs_status_t status)
{
    bool gone = peer->lost || status == UCS_ERR_CONNECTION_RESET || status == UCS_ERR_ENDPOINT_TIMEOUT ||
                status == UCS_ERR_UNREACHABLE || status == UCS_ERR_NOT_CONNECTED || status == UCS_ERR_CANCELED;
    return gone ? FAILED_PEER_LOST : FAILED_ERROR;
}

static void op_end(Op *op)
{
    op->previous->next = op->next;
    op->next->previous = op->previous;
    op->batch->in_flight--;
    op->batch->peer->operation_count--;
    free(op);
}

static void on_got(void *request, ucs_status_t status, void *argument)
{
    Op *op = argument;
    Batch *batch = op->batch;
    Peer *peer = batch->peer;
    Worker *w = peer->worker;
    op_end(op);
    if (status != UCS_OK)
        batch_failed(w, batch, failure_of(peer, status), w->ucx.ucs_status_string(status));
    w->ucx.ucp_request_free(request);
}

static ucs_status_t on_data(void *argument, const void *header, size_t header_bytes, void *payload, size_t nbytes,
                            const ucp_am_recv_param_t *param)
{
    Worker *w = argument;
    Data data;
    if (header_bytes != sizeof data || (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV))
        return UCS_OK;
    memcpy(&data, header, sizeof data);
    Peer *peer = peer_by_nonce(w, data.nonce);
    if (peer == NULL)
        return UCS_OK;
    Op *op = peer->operations.next;
    while (op != &peer->operations && op->id != data.operation)
        op = op->next;
    if (op == &peer->operations)
        return UCS_OK;
    if (data.offset == REFUSED || data.offset > op->nbytes || nbytes > op->nbytes - data.offset) {
        batch_failed(w, op->batch, FAILED_ERROR, "the source refuses: this memory is not registered there");
        op_end(op);
        return UCS_OK;
    }
    memcpy((char *)(uintptr_t)op->address + data.offset, payload, nbytes);
    op->got += nbytes;
    if (op->got == op->nbytes)
        op_end(op);
    return UCS_OK;
}

/* Starts a read of one piece. Returns UCS_OK when it is complete, UCS_INPROGRESS when `op` was taken over. */
static ucs_status_t start(Worker *w, Peer *peer, Op *op, uint64_t remote, const Key *key, const Region *region)
{
    if (!peer->direct) {
        char error[TEXT_BYTES];
        Read read = {peer->nonce, op->id, remote, op->nbytes};
        int sent = message_send(w, peer->endpoint, AM_READ, &read, sizeof read, NULL, 0, NULL, &peer->message_count,
                                error);
        return sent == 0 ? UCS_INPROGRESS : UCS_ERR_NOT_CONNECTED;
    }
    ucp_request_param_t params = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH |
                        UCP_OP_ATTR_FLAG_MULTI_SEND,
        .cb = {.send = on_got},
        .user_data = op,
        .memh = region->memory,
    };
    ucs_status_ptr_t request =
        w->ucx.ucp_get_nbx(peer->endpoint, (void *)(uintptr_t)op->address, op->nbytes, remote, key->key, &params);
    return UCS_PTR_IS_PTR(request) ? UCS_INPROGRESS : UCS_PTR_STATUS(request);
}

/* Posts the next piece of a batch: as much of its row as lies in one region on either side. Returns its bytes, or 0. */
static uint64_t post_next(Worker *w, Batch *batch)
{
    Peer *peer = batch->peer;
    const int64_t *row = batch->rows + 3 * batch->row;
    uint64_t local = (uint64_t)row[0] + batch->row_offset, remote = (uint64_t)row[1] + batch->row_offset;
    uint64_t nbytes = (uint64_t)row[2] - batch->row_offset;
    const Region *region = region_at(w, local);
    const Key *key = key_at(peer, remote);
    Op *op = malloc(sizeof *op);
    if (region == NULL || key == NULL || op == NULL) {
        free(op);
        batch_failed(w, batch, FAILED_ERROR, "memory of this transfer is no longer registered");
        return 0;
    }
    if (nbytes > region->address + region->nbytes - local)
        nbytes = region->address + region->nbytes - local;
    if (nbytes > key->address + key->nbytes - remote)
        nbytes = key->address + key->nbytes - remote;
    if (nbytes > OPERATION_BYTES)
        nbytes = OPERATION_BYTES;
    *op = (Op){.batch = batch, .id = ++w->last_operation, .address = local, .nbytes = nbytes};
    ucs_status_t status = start(w, peer, op, remote, key, region);
    if (status == UCS_INPROGRESS) {
        op->previous = peer->operations.previous;
        op->next = &peer->operations;
        op->previous->next = op->next->previous = op;
        batch->in_flight++;
        peer->operation_count++;
    } else {
        free(op);
    }
    if (status != UCS_OK && status != UCS_INPROGRESS) {
        batch_failed(w, batch, failure_of(peer, status), w->ucx.ucs_status_string(status));
        return 0;
    }
    batch->row_offset += nbytes;
    if (batch->row_offset == (uint64_t)row[2]) {
        batch->row++;
        batch->row_offset = 0;
    }
    return nbytes;
}

/* Posts what the windows allow, ends batches that are complete, late or without a peer. Returns whether more can be
 * posted at once. */
static bool advance(Worker *w)
{
    bool more = false;
    double time = w->batches != NULL || w->peers != NULL ? now() : 0;
    for (Peer *peer = w->peers; peer != NULL; peer = peer->next) {
        if (peer->ready || peer->lost || peer->closed)
            continue;
        if (peer->flushed && !peer->greeted)
            greet(w, peer);
        if (time >= peer->connect_deadline)
            peer_lost(peer, UCS_ERR_TIMED_OUT, "no answer by the deadline of the connect");
    }
    for (Batch **at = &w->batches; *at != NULL;) {
        Batch *batch = *at;
        Peer *peer = batch->peer;
        if (!batch->over && peer->lost)
            batch_failed(w, batch, FAILED_PEER_LOST, w->ucx.ucs_status_string(peer->status));
        bool complete = batch->row == batch->row_count && batch->in_flight == 0;
        if (!batch->over && !complete && time >= batch->deadline)
            batch_failed(w, batch, FAILED_DEADLINE, "not complete by its deadline");
        for (uint64_t posted = 0; peer->ready && !batch->over && batch->row < batch->row_count && peer->operation_count < w->window;) {
            if (posted >= TURN_BYTES) {
                more = true;
                break;
            }
            posted += post_next(w, batch);
        }
        if (!batch->over && batch->row == batch->row_count && batch->in_flight == 0) {
            batch->over = true;
            Event *event = event_new(w, EVENT_DONE, batch->ticket);
            if (event != NULL)
                event->nbytes = batch->nbytes;
        }
        if (batch->over && batch->in_flight == 0) {
            *at = batch->next;
            free(batch->rows);
            free(batch);
        } else {
            at = &batch->next;
        }
    }
    sweep_peers(w);
    return serve_advance(w) || more;
}

/* Whether every byte of the row is registered on both sides; a row may run over regions that touch. */
static bool row_inside(const Worker *w, const Peer *peer, const int64_t *row)
{
    uint64_t nbytes = (uint64_t)row[2];
    for (uint64_t at = 0; at < nbytes;) {
        const Region *region = region_at(w, (uint64_t)row[0] + at);
        if (region == NULL)
            return false;
        at = region->address + region->nbytes - (uint64_t)row[0];
    }
    for (uint64_t at = 0; at < nbytes;) {
        const Key *key = key_at(peer, (uint64_t)row[1] + at);
        if (key == NULL)
            return false;
        at = key->address + key->nbytes - (uint64_t)row[1];
    }
    return true;
}

int64_t worker_get(Worker *w, int64_t peer_id, int64_t *rows, size_t row_count, double deadline, char *error)
{
    Peer *peer = worker_peer(w, peer_id);
    Batch *batch = calloc(1, sizeof *batch);
    if (peer == NULL || batch == NULL) {
        snprintf(error, TEXT_BYTES, "%s", peer == NULL ? "no such peer" : "out of memory");
        goto refuse;
    }
    for (size_t i = 0; i < row_count; i++) {
        const int64_t *row = rows + 3 * i;
        if (row[2] <= 0 || !row_inside(w, peer, row)) {
            snprintf(error, TEXT_BYTES, "row %zu (local %#llx, remote %#llx, %lld bytes) is not registered memory", i,
                     (unsigned long long)row[0], (unsigned long long)row[1], (long long)row[2]);
            goto refuse;
        }
        batch->nbytes += (uint64_t)row[2];
    }
    batch->ticket = ++w->last_id;
    batch->peer = peer;
    batch->rows = rows;
    batch->row_count = row_count;
    batch->deadline = deadline;
    int64_t ticket = batch->ticket;
    Batch **at = &w->batches;
    while (*at != NULL)
        at = &(*at)->next;
    *at = batch;
    advance(w);
    return ticket;
refuse:
    free(batch);
    free(rows);
    return -1;
}

/* ---- signals ---- */

static ucs_status_t on_signal(void *argument, const void *header, size_t header_bytes, void *data, size_t nbytes,
                              const ucp_am_recv_param_t *param)
{
    Worker *w = argument;
    if (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)
        return UCS_OK; /* never sent by us: signals are eager */
    Event *event = event_new(w, EVENT_SIGNAL, 0);
    if (event == NULL || (event->data = malloc(header_bytes + nbytes + 1)) == NULL)
        return UCS_OK;
    memcpy(event->data, header, header_bytes);
    memcpy(event->data + header_bytes, data, nbytes);
    event->sender_bytes = header_bytes;
    event->data_bytes = nbytes;
    return UCS_OK;
}

int worker_signal(Worker *w, int64_t peer_id, const void *payload, size_t nbytes, char *error)
{
    Peer *peer = worker_peer(w, peer_id);
    if (peer == NULL || peer->lost) {
        snprintf(error, TEXT_BYTES, "%s", peer == NULL ? "no such peer" : "the peer is lost");
        return -1;
    }
    if (peer->message_count >= MESSAGES_PER_PEER) {
        snprintf(error, TEXT_BYTES, "%d messages to the peer are unsent", MESSAGES_PER_PEER);
        return -1;
    }
    return message_send(w, peer->endpoint, AM_SIGNAL, w->name, w->name_bytes, payload, nbytes, NULL,
                        &peer->message_count, error);
}

/* ---- waiting ---- */

void worker_wake(Worker *w)
{
    atomic_store(&w->woken, 1);
    uint64_t one = 1;
    ssize_t written = write(w->wake_fd, &one, sizeof one);
    (void)written; /* full means that a wake is pending already */
}

static double next_deadline(const Worker *w, double end)
{
    bool busy = false;
    for (const Batch *batch = w->batches; batch != NULL; batch = batch->next) {
        busy = true;
        if (!batch->over && batch->deadline < end)
            end = batch->deadline;
    }
    for (const Peer *peer = w->peers; peer != NULL; peer = peer->next) {
        busy = busy || peer->closed || !peer_idle(peer);
        if (!peer->ready && !peer->lost && peer->connect_deadline < end)
            end = peer->connect_deadline;
    }
    double longest = now() + (busy ? SLEEP_BUSY_S : SLEEP_IDLE_S);
    return end < longest ? end : longest;
}

/* Returns false when a Unix signal came. */
static bool sleep_until(Worker *w, double end)
{
    double left = end - now();
    if (left <= 0)
        return true;
    struct pollfd fds[2] = {{.fd = w->ucx_fd, .events = POLLIN}, {.fd = w->wake_fd, .events = POLLIN}};
    struct timespec timeout = {.tv_sec = (time_t)left, .tv_nsec = (long)((left - floor(left)) * 1e9)};
    int ready = ppoll(fds, 2, &timeout, NULL);
    if (ready < 0)
        return errno != EINTR;
    uint64_t count;
    if (fds[1].revents != 0 && read(w->wake_fd, &count, sizeof count) < 0)
        return errno == EAGAIN;
    return true;
}

void worker_poll(Worker *w, double timeout_s)
{
    double end = now() + timeout_s;
    for (;;) {
        unsigned progressed = w->ucx.ucp_worker_progress(w->worker);
        bool more = advance(w);
        if (atomic_exchange(&w->woken, 0) || w->first_event != NULL)
            return;
        if (now() >= end)
            return;
        if (progressed != 0 || more || w->ucx.ucp_worker_arm(w->worker) == UCS_ERR_BUSY)
            continue;
        if (!sleep_until(w, next_deadline(w, end)))
            return;
    }
}

/* Progress without the descriptor, for ends of operations that it may not announce. */
static void spin_once(Worker *w)
{
    if (w->ucx.ucp_worker_progress(w->worker) == 0 && !advance(w)) {
        struct timespec pause = {.tv_nsec = 50000};
        nanosleep(&pause, NULL);
    }
}

/* ---- fences and the end ---- */

void close_endpoint(Worker *w, ucp_ep_h *endpoint, unsigned flags, double end)
{
    ucp_request_param_t params = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = flags};
    ucs_status_ptr_t request = w->ucx.ucp_ep_close_nbx(*endpoint, &params);
    *endpoint = NULL;
    if (!UCS_PTR_IS_PTR(request))
        return;
    while (w->ucx.ucp_request_check_status(request) == UCS_INPROGRESS && now() < end)
        spin_once(w);
    w->ucx.ucp_request_free(request);
}

static void say_bye(Worker *w, Peer *peer)
{
    char error[TEXT_BYTES];
    Hello bye = {peer->nonce};
    if (peer->greeted)
        message_send(w, peer->endpoint, AM_BYE, &bye, sizeof bye, NULL, 0, NULL, &peer->message_count, error);
}

typedef struct {
    Worker *worker;
    bool done, abandoned;
} FlushWait;

static void on_flushed(void *request, ucs_status_t status, void *argument)
{
    (void)status;
    FlushWait *wait = argument;
    wait->done = true;
    wait->worker->ucx.ucp_request_free(request);
    if (wait->abandoned)
        free(wait);
}

/* UCX takes an endpoint's lanes down after its close has returned, and a worker flush waits for that. It waits for
 * other peers as well, one of which may hang, hence flush_end. */
static void settle(Worker *w, double settle_end, double flush_end)
{
    FlushWait *wait = calloc(1, sizeof *wait);
    if (wait != NULL) {
        wait->worker = w;
        ucp_request_param_t params = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                                      .cb = {.send = on_flushed},
                                      .user_data = wait};
        ucs_status_ptr_t request = w->ucx.ucp_worker_flush_nbx(w->worker, &params);
        if (!UCS_PTR_IS_PTR(request))
            wait->done = true;
        while (!wait->done && now() < flush_end)
            spin_once(w);
        if (wait->done)
            free(wait);
        else
            wait->abandoned = true;
    }
    while (now() < settle_end)
        spin_once(w);
}

int worker_fence(Worker *w, int64_t id, double limit_s, double settle_s, int64_t **left, size_t *left_count,
                 char *error)
{
    Peer *peer = worker_peer(w, id);
    if (peer == NULL) {
        snprintf(error, TEXT_BYTES, "no such peer");
        return -1;
    }
    double end = now() + limit_s;
    if (!peer->lost) {
        say_bye(w, peer);
        peer->lost = true; /* no event: who fences knows */
        peer->status = UCS_ERR_CANCELED;
    }
    peer_batches_failed(w, peer, FAILED_FENCED, "given up");
    while (!peer->direct && peer->operation_count > 0)
        op_end(peer->operations.next); /* on_data finds them no more */
    close_endpoint(w, &peer->endpoint, UCP_EP_CLOSE_FLAG_FORCE, end);
    while (!peer_idle(peer) && now() < end)
        spin_once(w);
    double start = now();
    settle(w, start + settle_s, start + 4 * settle_s);
    *left = calloc(2 * peer->operation_count + 1, sizeof **left);
    *left_count = 0;
    for (Op *op = peer->operations.next; op != &peer->operations && *left != NULL; op = op->next) {
        (*left)[2 * *left_count] = (int64_t)op->address;
        (*left)[2 * (*left_count)++ + 1] = (int64_t)op->nbytes;
    }
    peer->closed = true;
    advance(w);
    return *left == NULL ? fail(w, error, "fence", UCS_ERR_NO_MEMORY) : 0;
}

static void free_all(Worker *w)
{
    while (w->batches != NULL) {
        Batch *batch = w->batches;
        w->batches = batch->next;
        free(batch->rows);
        free(batch);
    }
    while (w->peers != NULL) {
        Peer *peer = w->peers;
        w->peers = peer->next;
        free(peer->keys);
        free(peer);
    }
    for (Event *event = worker_take_events(w), *next; event != NULL; event = next) {
        next = event->next;
        event_free(event);
    }
    serve_free(w);
    free(w->regions);
    free(w->name);
    w->regions = NULL;
    w->name = NULL;
    w->region_count = 0;
}

void worker_close(Worker *w, double limit_s)
{
    if (!w->open)
        return;
    w->open = false;
    double end = now() + limit_s;
    for (Peer *peer = w->peers; peer != NULL; peer = peer->next) {
        peer_batches_failed(w, peer, FAILED_FENCED, "the transport is closed");
        while (!peer->direct && peer->operation_count > 0)
            op_end(peer->operations.next);
        bool graceful = !peer->lost && !peer->closed && peer->ready && peer->operation_count == 0;
        if (graceful)
            say_bye(w, peer);
        peer->lost = true;
        if (peer->endpoint != NULL)
            close_endpoint(w, &peer->endpoint, graceful ? 0 : UCP_EP_CLOSE_FLAG_FORCE, end);
    }
    serve_close(w, end);
    bool idle = false;
    while (!idle && now() < end) {
        spin_once(w);
        idle = serve_idle(w);
        for (Peer *peer = w->peers; peer != NULL; peer = peer->next)
            idle = idle && peer_idle(peer);
    }
    for (Peer *peer = w->peers; peer != NULL; peer = peer->next) {
        for (size_t i = 0; i < peer->key_count; i++)
            w->ucx.ucp_rkey_destroy(peer->keys[i].key);
        peer->key_count = 0;
    }
    w->ucx.ucp_worker_destroy(w->worker);
    for (size_t i = 0; i < w->region_count; i++)
        w->ucx.ucp_mem_unmap(w->context, w->regions[i].memory);
    w->ucx.ucp_cleanup(w->context);
    close(w->wake_fd);
    free_all(w);
}

/* ---- the start ---- */

/* settings: triples of name, value and kind. A "default" gives way to the environment, and UCX may lack it. */
static int read_config(Worker *w, const char *const *settings, size_t count, ucp_config_t **config, char *error)
{
    ucs_status_t status = w->ucx.ucp_config_read(NULL, NULL, config);
    if (status != UCS_OK)
        return fail(w, error, "UCX settings", status);
    for (size_t i = 0; i < count; i++) {
        const char *name = settings[3 * i], *value = settings[3 * i + 1];
        bool is_default = strcmp(settings[3 * i + 2], "default") == 0;
        char variable[128];
        snprintf(variable, sizeof variable, "UCX_%s", name);
        if (is_default && getenv(variable) != NULL)
            continue;
        status = w->ucx.ucp_config_modify(*config, name, value);
        if (status != UCS_OK && !is_default) {
            w->ucx.ucp_config_release(*config);
            snprintf(error, TEXT_BYTES, "UCX setting %s=%s: %s", name, value, w->ucx.ucs_status_string(status));
            return -1;
        }
    }
    return 0;
}

ucs_status_t set_handler(Worker *w, unsigned id, ucp_am_recv_callback_t callback)
{
    ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = id,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = callback,
        .arg = w,
    };
    return w->ucx.ucp_worker_set_am_recv_handler(w->worker, &handler);
}

static int open_worker(Worker *w, char *error)
{
    ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                  .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    ucs_status_t status = w->ucx.ucp_worker_create(w->context, &params, &w->worker);
    if (status != UCS_OK)
        return fail(w, error, "UCX worker", status);
    status = set_handler(w, AM_SIGNAL, on_signal);
    if (status == UCS_OK)
        status = set_handler(w, AM_WELCOME, on_welcome);
    if (status == UCS_OK)
        status = set_handler(w, AM_DATA, on_data);
    if (status == UCS_OK)
        status = set_handler(w, AM_BYE, on_bye);
    if (status == UCS_OK)
        status = serve_set_handlers(w);
    if (status == UCS_OK)
        status = w->ucx.ucp_worker_get_efd(w->worker, &w->ucx_fd);
    if (status == UCS_OK) {
        w->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        if (w->wake_fd >= 0)
            return 0;
        status = UCS_ERR_NO_RESOURCE;
    }
    w->ucx.ucp_worker_destroy(w->worker);
    return fail(w, error, "UCX wake-up descriptor", status);
}

int worker_open(Worker *w, const char *library, const char *name, size_t name_bytes, size_t window, bool direct,
                const char *const *settings, size_t setting_count, char *error)
{
    memset(w, 0, sizeof *w);
    if (ucx_library_load(&w->ucx, library, error, TEXT_BYTES) != 0)
        return -1;
    ucp_config_t *config;
    if (read_config(w, settings, setting_count, &config, error) != 0)
        return -1;
    ucp_params_t params = {
        .field_mask = UCP_PARAM_FIELD_FEATURES,
        .features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
    };
    /* The oldest interface that has all of this, since a newer one makes an older library complain. */
    ucs_status_t status = w->ucx.ucp_init_version(1, 13, &params, config, &w->context);
    w->ucx.ucp_config_release(config);
    if (status != UCS_OK)
        return fail(w, error, "UCX start", status);
    w->name = malloc(name_bytes + 1);
    if (w->name == NULL || open_worker(w, error) != 0) {
        free(w->name);
        w->ucx.ucp_cleanup(w->context);
        return -1;
    }
    memcpy(w->name, name, name_bytes);
    w->name_bytes = name_bytes;
    w->window = window;
    w->direct = direct;
    w->open = true;
    return 0;
}
