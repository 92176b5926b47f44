//! Gates against float64.

use specrs_cpu_kernels::{decay, rate, sigmoid};

#[test]
fn gates_are_accurate() {
    for i in -40_000..40_000 {
        let x = i as f32 * 2.5e-3;
        let exact = 1.0 / (1.0 + (-f64::from(x)).exp());
        assert!((f64::from(sigmoid(x)) - exact).abs() <= 2_f64.powi(-24) * exact + 1e-45, "sigmoid of {x}");
        let (bias, a_log) = ((i % 17) as f32 * 0.3, (i % 23) as f32 * 0.15 - 1.0);
        let softplus = (f64::from(x) + f64::from(bias)).exp().ln_1p();
        let exact = (-f64::from(a_log).exp() * softplus).exp();
        let found = f64::from(decay(x, bias, rate(a_log)));
        assert!((found - exact).abs() <= 2_f64.powi(-23) * exact + 1e-44, "decay of {x} {bias} {a_log}: {found}");
    }
}

#[test]
fn ends_of_gates() {
    assert!(sigmoid(f32::NAN).is_nan() && decay(f32::NAN, 0.0, 1.0).is_nan());
    assert_eq!((sigmoid(f32::NEG_INFINITY), sigmoid(f32::INFINITY)), (0.0, 1.0));
    assert_eq!((decay(-1e30, 0.0, 1.0), decay(1e30, 0.0, 1.0)), (1.0, 0.0));
}
