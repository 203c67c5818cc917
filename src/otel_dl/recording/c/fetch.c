/* Fetch: what a worker reads for one batch, from the task to the answer; ordinary ones are recorded here. */

#include "native.h"
#include <string.h>
#include <unistd.h>

/* Whether the span that stands for the fetch is in the context, and nobody has asked for its ids: then it may stand for
 * the next one as well. */
static int
worker_span_unasked(Worker *worker)
{
    if (worker->asked || worker->span == NULL || worker->span == Py_None || worker->variable == NULL)
        return 0;
    PyObject *context = NULL;
    if (PyContextVar_Get(worker->variable, NULL, &context) < 0) {
        PyErr_Clear();
        return 0;
    }
    int same = context != NULL && context == worker->attached;
    Py_XDECREF(context);
    return same;
}

/* The Adler-32 of zlib (RFC 1950), of less than 5,552 bytes: the sums can't overflow before then. */
static uint32_t
adler32(const unsigned char *data, size_t size)
{
    uint32_t low = 1, high = 0;
    for (size_t i = 0; i < size; i++) {
        low += data[i];
        high += low;
    }
    return (high % 65521) << 16 | low % 65521;
}

/* Writes the indices of the samples, a list of them or one; -1 where they are something else. */
static int64_t
worker_samples(Worker *worker, PyObject *samples)
{
    PyObject **items = &samples;
    Py_ssize_t count = 1;
    if (PyList_CheckExact(samples)) {
        items = ((PyListObject *)samples)->ob_item;
        count = PyList_GET_SIZE(samples);
    }
    if (count < 1 || count > SAMPLES_MOST)
        return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        int overflow = 1;
        int64_t value = PyLong_CheckExact(items[i]) ? PyLong_AsLongLongAndOverflow(items[i], &overflow) : 0;
        if (overflow)
            return -1;
        worker->sample_words[i] = value;
    }
    return count;
}

/* torch's loop was given `message`; whether that was an ordinary fetch that begins. */
int
worker_received(Worker *worker, PyObject *message)
{
    if ((long long)getpid() != worker->pid || worker->fetching || worker->phase == NULL || !PyTuple_CheckExact(message) || PyTuple_GET_SIZE(message) != 2
        || !PyLong_CheckExact(PyTuple_GET_ITEM(message, 0)) || !worker_span_unasked(worker))
        return 0;
    int overflow;
    int64_t index = PyLong_AsLongLongAndOverflow(PyTuple_GET_ITEM(message, 0), &overflow);
    if (overflow)
        return 0;
    int64_t start = now();
    PyObject *samples = PyTuple_GET_ITEM(message, 1);
    int64_t count = worker_samples(worker, samples);
    if (count < 0)
        return 0;
    int64_t sum = adler32((const unsigned char *)worker->sample_words, (size_t)count * 8);
    BLOCK(worker->batch, sum, worker->round, index, start, count, FORM_INTEGERS);
    BLOCK(worker->phase, 0, FETCH, start);
    worker->index = index;
    worker->start = start;
    worker->room = worker->span_limit;
    worker->dropped = 0;
    worker->fetching = 1;
    Py_INCREF(samples);
    Py_XSETREF(worker->samples, samples);
    return 1;
}

/* torch's loop is about to hand `message` over; whether that is an ordinary fetch that ends. */
int
worker_answers(Worker *worker, PyObject *message)
{
    if (!worker->fetching || worker->phase == NULL || !PyTuple_CheckExact(message) || PyTuple_GET_SIZE(message) != 2
        || !PyLong_CheckExact(PyTuple_GET_ITEM(message, 0)) || worker->dropped || worker->room != worker->span_limit
        || !worker_span_unasked(worker))
        return 0;
    int overflow;
    if (PyLong_AsLongLongAndOverflow(PyTuple_GET_ITEM(message, 0), &overflow) != worker->index || overflow)
        return 0;
    const char *kind = Py_TYPE(PyTuple_GET_ITEM(message, 1))->tp_name;
    if (strcmp(kind, "ExceptionWrapper") == 0 || strcmp(kind, "_IterableDatasetStopIteration") == 0)
        return 0;
    if (worker->entries != NULL && PyDict_Check(worker->entries)
        && PyDict_Size(worker->entries) != worker->entries_count)
        return 0;
    if ((long long)getpid() != worker->pid)
        return 0;
    int64_t end = now(), duration = end - worker->start;
    if (worker->fetches >= WARM && duration > SLOW * worker->mean)
        return 0;
    worker->fetches++;
    int64_t among = worker->fetches < WARM ? worker->fetches : WARM, change = duration - worker->mean;
    worker->mean += change >= 0 ? change / among : -((-change + among - 1) / among); /* Python's //: downwards */
    int64_t *head = worker->ring + RING_HEAD / 8, *done = worker->done, number = *head;
    int64_t slot = (int64_t)((uint64_t)number % RING_SLOTS); /* within the ring, whatever somebody has written there */
    BLOCK(worker->ring + RING_FIRST / 8 + 6 * slot, 0, worker->round, worker->index, worker->start, end, number);
    __atomic_store_n(head, number + 1, __ATOMIC_RELEASE);
    int64_t fetches = done[3] + 1, busy = done[4] + duration, since = fetches > 1 ? done[2] : worker->began,
            idle = done[5] + (worker->start - since);
    BLOCK(done, 0, worker->round, worker->index, end, fetches, busy, idle);
    BLOCK(worker->phase, 0, 0, end);
    worker->fetching = 0;
    Py_INCREF(Py_None);
    Py_XSETREF(worker->samples, Py_None);
    return 1;
}
