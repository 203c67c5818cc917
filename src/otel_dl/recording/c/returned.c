/* Returned: a worker's batch has come, and `next()` is about to return it. */

#include "native.h"

/* `_process_data(iterator, data, worker)` of torch 2.8 and newer: notes whose the batch is that `next()` returns. */
PyObject *
returned_call(Hook *hook, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    if (PyVectorcall_NARGS(nargsf) >= 3 && PyLong_Check(args[2])) { /* torchdata's has a fourth */
        PyObject *found = PyObject_GetAttr(args[0], str_source);
        if (found != NULL && PyObject_TypeCheck(found, &SourceType)) {
            Source *source = (Source *)found;
            Py_ssize_t number = PyLong_AsSsize_t(args[2]);
            if (source->pids != NULL && PyTuple_CheckExact(source->pids) && number >= 0
                && number < PyTuple_GET_SIZE(source->pids) && source->nonce != NULL && source->method != NULL) {
                long long place = source->last;
                if (source->in_order) {
                    PyObject *received = PyObject_GetAttr(args[0], str_rcvd_idx);
                    place = received == NULL ? -1 : PyLong_AsLongLong(received) - 1; /* its caller has counted it */
                    Py_XDECREF(received);
                }
                if (!PyErr_Occurred()) {
                    PyObject *batch = batch_tuple(source, place, source->nonce, source->round, args[2],
                                                  PyTuple_GET_ITEM(source->pids, number), source->method);
                    Py_XSETREF(source->batch, batch);
                }
            }
        }
        Py_XDECREF(found);
        if (PyErr_Occurred() && own_fault(hook) < 0)
            return NULL;
    }
    return PyObject_Vectorcall(hook->original, args, nargsf, kwnames);
}
