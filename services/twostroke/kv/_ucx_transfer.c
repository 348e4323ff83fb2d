/* Batches of reads, posted as the windows allow, and the bytes that answer them. */
#include "_ucx_worker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    OPERATION_BYTES = 4 << 20, /* a long run is cut, so that a deadline or another peer need not wait for all of it */
    TURN_BYTES = 16 << 20,     /* posted per batch and turn, where a GET completes in the call that posts it */
};

static Key *key_at(const Peer *peer, uint64_t address)
{
    int i = find_at(peer->keys, peer->key_count, sizeof *peer->keys, address);
    if (i < 0 || address - peer->keys[i].address >= peer->keys[i].nbytes)
        return NULL;
    return &peer->keys[i];
}

/* ---- transfers ---- */

void batch_failed(Worker *w, Batch *batch, Failure failure, const char *text)
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

void peer_batches_failed(Worker *w, Peer *peer, Failure failure, const char *text)
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

void op_end(Op *op)
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
bool advance_all(Worker *w)
{
    bool more = false;
    double time = w->batches != NULL || w->peers != NULL ? now_s() : 0;
    peers_advance(w, time);
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
    advance_all(w);
    return ticket;
refuse:
    free(batch);
    free(rows);
    return -1;
}

ucs_status_t transfer_set_handlers(Worker *w)
{
    return set_handler(w, AM_DATA, on_data);
}
