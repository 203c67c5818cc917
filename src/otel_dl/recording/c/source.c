/* Source: the part of an iterator's `patches.dataloader.Info` that each batch asks for. */

#include "native.h"

static PyMemberDef source_members[] = {
    {"alone", T_BOOL, offsetof(Source, alone), 0, NULL},
    {"loader", T_LONGLONG, offsetof(Source, loader), 0, NULL},
    {"epoch", T_LONGLONG, offsetof(Source, epoch), 0, NULL},
    {"fetched", T_LONGLONG, offsetof(Source, fetched), 0, NULL},
    {"in_order", T_BOOL, offsetof(Source, in_order), 0, NULL},
    {"round", T_LONGLONG, offsetof(Source, round), 0, NULL},
    {"last", T_LONGLONG, offsetof(Source, last), 0, NULL},
    {"batch", T_OBJECT, offsetof(Source, batch), 0, NULL},
    {"nonce", T_OBJECT, offsetof(Source, nonce), 0, NULL},
    {"pids", T_OBJECT, offsetof(Source, pids), 0, NULL},
    {"method", T_OBJECT, offsetof(Source, method), 0, NULL},
    {NULL}};

static int
source_traverse(Source *self, visitproc visit, void *arg)
{
    Py_VISIT(self->batch);
    Py_VISIT(self->nonce);
    Py_VISIT(self->pids);
    Py_VISIT(self->method);
    return 0;
}

static int
source_clear(Source *self)
{
    Py_CLEAR(self->batch);
    Py_CLEAR(self->nonce);
    Py_CLEAR(self->pids);
    Py_CLEAR(self->method);
    return 0;
}

static void
source_dealloc(Source *self)
{
    PyObject_GC_UnTrack(self);
    source_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

PyTypeObject SourceType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "otel_dl.recording._native.SourceState",
    .tp_basicsize = sizeof(Source),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_members = source_members,
    .tp_traverse = (traverseproc)source_traverse,
    .tp_clear = (inquiry)source_clear,
    .tp_dealloc = (destructor)source_dealloc,
};

/* (loader, epoch, place, nonce, round, worker, pid, start method): a `records.Batch`. */
PyObject *
batch_tuple(Source *source, long long place, PyObject *nonce, long long round, PyObject *worker, PyObject *pid,
            PyObject *method)
{
    PyObject *batch = PyTuple_New(8);
    if (batch == NULL)
        return NULL;
    PyObject *numbers[] = {PyLong_FromLongLong(source->loader), PyLong_FromLongLong(source->epoch),
                           PyLong_FromLongLong(place), PyLong_FromLongLong(round)};
    PyObject *others[] = {nonce, worker, pid, method};
    static const int places[] = {0, 1, 2, 4}, other_places[] = {3, 5, 6, 7};
    int failed = 0;
    for (int i = 0; i < 4; i++) {
        failed |= numbers[i] == NULL;
        PyTuple_SET_ITEM(batch, places[i], numbers[i]);
        Py_INCREF(others[i]);
        PyTuple_SET_ITEM(batch, other_places[i], others[i]);
    }
    if (failed)
        Py_CLEAR(batch);
    return batch;
}
