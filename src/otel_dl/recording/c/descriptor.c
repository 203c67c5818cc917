/* Descriptor: a method that is written in C is a descriptor, which finds its function in a PyMethodDef. That one is
 * changed, for a copy with a function of ours: the descriptor, what is bound of it, and the class's dict stay what they
 * were. A function can only tell by itself which method it stands for, so there is one for each. Nothing of it ever
 * goes: what was bound before it was taken back keeps the copy. */

#include "native.h"

#define EACH(_)                                                                                                        \
    _(0) _(1) _(2) _(3) _(4) _(5) _(6) _(7) _(8) _(9) _(10) _(11) _(12) _(13) _(14) _(15)                              \
    _(16) _(17) _(18) _(19) _(20) _(21) _(22) _(23) _(24) _(25) _(26) _(27) _(28) _(29) _(30) _(31)
enum { SWAPPED = 32 };

static struct {
    PyMethodDescrObject *descriptor; /* NULL: free */
    PyMethodDef *theirs;
    PyMethodDef ours;
    Method *method; /* NULL: nobody wants to know */
} swapped[SWAPPED];

static PyObject *
swapped_call(int which, PyObject *tensor, PyObject *args, PyObject *kwargs)
{
    PyMethodDef *theirs = swapped[which].theirs;
    Method *method = (Method *)Py_XNewRef((PyObject *)swapped[which].method);
    int plain = method == NULL ? 1 : method_is_plain(method, tensor, args, kwargs);
    PyObject *result = NULL;
    if (plain == 0) {
        PyObject *bound = PyMethod_New(method->waits, tensor);
        if (bound != NULL)
            result = args == NULL ? PyObject_CallNoArgs(bound) : PyObject_Call(bound, args, kwargs);
        Py_XDECREF(bound);
    } else if (plain > 0) {
        result = theirs->ml_flags == METH_NOARGS
                     ? theirs->ml_meth(tensor, NULL)
                     : ((PyCFunctionWithKeywords)(void (*)(void))theirs->ml_meth)(tensor, args, kwargs);
    }
    Py_XDECREF(method);
    return result;
}

#define ONE(i)                                                                                                         \
    static PyObject *swapped_alone_##i(PyObject *tensor, PyObject *none) { return swapped_call(i, tensor, NULL, NULL); } \
    static PyObject *swapped_keywords_##i(PyObject *tensor, PyObject *args, PyObject *kwargs)                          \
    {                                                                                                                  \
        return swapped_call(i, tensor, args, kwargs);                                                                  \
    }
EACH(ONE)
#undef ONE
#define ONE(i) {swapped_alone_##i, (PyCFunction)(void (*)(void))swapped_keywords_##i},
static const struct {
    PyCFunction alone, keywords;
} swapped_functions[SWAPPED] = {EACH(ONE)};
#undef ONE
#undef EACH

/* The index of what stands for a descriptor, or -1. */
static int
swapped_find(PyObject *descriptor, int may_be_free)
{
    for (int i = 0; i < SWAPPED; i++) {
        if (swapped[i].descriptor == (PyMethodDescrObject *)descriptor || (may_be_free && swapped[i].descriptor == NULL))
            return i;
    }
    return -1;
}

/* own_method(descriptor): another one for the same method, which calls torch's function whoever is asked of the first;
 * None: it can't be swapped. */
PyObject *
own_method(PyObject *self, PyObject *descriptor)
{
    if (Py_TYPE(descriptor) != &PyMethodDescr_Type)
        Py_RETURN_NONE;
    int found = swapped_find(descriptor, 0);
    PyMethodDef *theirs = found < 0 ? ((PyMethodDescrObject *)descriptor)->d_method : swapped[found].theirs;
    if (theirs->ml_flags != METH_NOARGS && theirs->ml_flags != (METH_VARARGS | METH_KEYWORDS))
        Py_RETURN_NONE;
    if (swapped_find(descriptor, 1) < 0)
        Py_RETURN_NONE;
    return PyDescr_NewMethod(PyDescr_TYPE(descriptor), theirs);
}

/* swap_method(descriptor, method): it decides, and its `waits` is called, from now on; without, torch's function is put
 * back. For what `own_method` gave one. */
PyObject *
swap_method(PyObject *self, PyObject *args)
{
    PyMethodDescrObject *descriptor;
    Method *method = NULL;
    if (!PyArg_ParseTuple(args, "O!|O!", &PyMethodDescr_Type, &descriptor, &MethodType, &method))
        return NULL;
    int which = swapped_find((PyObject *)descriptor, method != NULL);
    if (which < 0) {
        PyErr_SetString(PyExc_ValueError, "it is not swapped, or there is no room for it");
        return NULL;
    }
    if (swapped[which].descriptor == NULL) {
        int alone = descriptor->d_method->ml_flags == METH_NOARGS;
        swapped[which].theirs = descriptor->d_method;
        swapped[which].ours = *descriptor->d_method;
        swapped[which].ours.ml_meth = alone ? swapped_functions[which].alone : swapped_functions[which].keywords;
        swapped[which].descriptor = (PyMethodDescrObject *)Py_NewRef((PyObject *)descriptor);
    }
    Py_XINCREF(method);
    Py_XSETREF(swapped[which].method, method);
    PyMethodDef *ours = &swapped[which].ours, *theirs = swapped[which].theirs;
    if (descriptor->d_method == (method != NULL ? theirs : ours))
        descriptor->d_method = method != NULL ? ours : theirs;
    Py_RETURN_NONE;
}
